"""What a run costs: the window, its meters, and what the meters are held against."""
