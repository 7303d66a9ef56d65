"""Intervals of step times: held to simulated machines, where the truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distbench.runs.noise import (
    ASSUMED_BETWEEN,
    LEVEL,
    Ratio,
    StepTimes,
    Windows,
    log_medians,
    student_inside,
    student_quantile,
)
from tests.runs.noisy import Noise, simulate

SWEEPS = 200


def share_found(medians: list[float], noise: Noise, repeats: int = 3, family: bool = False) -> float:
    """In which share of simulated sweeps a difference is seen: of the first two, or of anyone to the fastest."""
    random = np.random.default_rng(7)
    found = 0
    for _ in range(SWEEPS):
        times = StepTimes.of(simulate(random, medians, repeats, noise))
        count = len(medians)
        if family:
            best = int(np.argmin(times.log_medians))
            verdicts = [times.ratio(index, best).verdict for index in range(count)]
            found += any(verdict != "no difference" for verdict in verdicts)
        else:
            found += times.ratio(1, 0).verdict != "no difference"
    return found / SWEEPS


@pytest.mark.parametrize(
    "noise",
    [
        Noise(),
        Noise(between=0.04, windows=0.02),
        Noise(between=0.0, windows=0.03),
        Noise(between=0.01, steps=0.15, hiccups=0.2),
    ],
    ids=["usual", "drifting runs", "drifting windows", "rough steps"],
)
def test_identical_configurations_are_no_different_in_19_of_20_sweeps(noise: Noise) -> None:
    assert share_found([0.01, 0.01], noise) <= 0.05


@pytest.mark.parametrize("candidates", [6, 16])
@pytest.mark.parametrize("repeats", [3, 10])
@pytest.mark.parametrize("blocked", [True, False], ids=["repeat by repeat", "all together"])
def test_nor_is_any_of_many_to_the_fastest(candidates: int, repeats: int, blocked: bool) -> None:
    """The fastest is who came out so: of many that are the same, the pair that chance has set apart furthest."""
    random, numbers = np.random.default_rng(7), [[str(n) for n in range(repeats)]] * candidates

    def found(uneven: float) -> float:
        spreads = np.array([0.03] * (candidates - 1) + [uneven])[:, None]
        count = 0
        for _ in range(SWEEPS):
            runs = [[(np.array([m]),) for m in row] for row in np.exp(random.normal(0, spreads, (candidates, repeats)))]
            times = StepTimes.of(runs, numbers if blocked else ())
            best = int(np.argmin(times.log_medians))
            count += any(times.ratio(index, best).verdict != "no difference" for index in range(candidates))
        return count / SWEEPS

    assert found(0.03) <= LEVEL
    assert found(0.15) <= 0.10, "one that scatters five times as much: what is pooled is too small for it"


def test_two_of_which_one_runs_less_evenly() -> None:
    random = np.random.default_rng(1)
    found = 0
    for _ in range(SWEEPS):
        steady, uneven = (simulate(random, [0.01], 3, Noise(between=between))[0] for between in (0.005, 0.04))
        found += StepTimes.of([steady, uneven]).ratio(1, 0).verdict != "no difference"
    assert found / SWEEPS <= 0.08


def test_ten_percent_slower_is_found_with_three_repeats() -> None:
    assert share_found([0.01, 0.011], Noise()) >= 0.9
    assert share_found([0.01, 0.011, 0.013, 0.015], Noise()) >= 0.75, "four are held to all six of their differences"
    assert share_found([0.01, 0.011, 0.013, 0.015], Noise(), repeats=5) >= 0.98


def test_steps_alone_would_see_differences_that_are_not_there() -> None:
    """Why windows and runs are resampled, and not just steps: the same sweeps, each run's windows taken as one."""
    random = np.random.default_rng(7)
    naive = 0
    for _ in range(SWEEPS):
        a, b = (runs[0] for runs in simulate(random, [0.01, 0.01], 1, Noise(between=0.03)))
        medians, variances = log_medians([(np.concatenate(a),), (np.concatenate(b),)])
        naive += abs(medians[0] - medians[1]) > 1.96 * math.sqrt(variances.sum())
    assert naive / SWEEPS > 0.3


def test_without_repeats_the_spread_of_runs_is_assumed() -> None:
    times = StepTimes.of([[(np.full(10, 0.01),)], [(np.full(10, 0.0104),)], [(np.full(10, 0.012),)]])
    assert times.assumed and times.between == ASSUMED_BETWEEN
    assert times.ratio(1, 0).verdict == "no difference" and times.ratio(2, 0).verdict == "slower"
    assert times.ratio(0, 2).verdict == "faster" and times.ratio(0, 0) == Ratio(1.0, 1.0, 1.0)


def test_repeats_of_some_stand_for_all() -> None:
    random = np.random.default_rng(0)
    repeated = simulate(random, [0.01, 0.01], 4, Noise(between=0.01))
    times = StepTimes.of([*repeated, [(np.full(10, 0.012),)]])
    assert not times.assumed and times.degrees == 6 and 0.002 < times.between < 0.03
    assert times.errors[2] > times.errors[0], "one run says less than four"


def test_a_runs_figure_does_not_depend_on_the_others() -> None:
    random = np.random.default_rng(0)
    runs = [runs[0] for runs in simulate(random, [0.01, 0.02, 0.03], 1, Noise())]
    together, alone = log_medians(runs), log_medians(runs[1:2])
    assert together[0][1] == pytest.approx(alone[0][0]) and together[1][1] == pytest.approx(alone[1][0])


def test_windows_of_any_length() -> None:
    medians, variances = log_medians([(np.array([1.0]),), (np.array([1.0, 2.0, 4.0]), np.array([2.0])), (np.ones(5),)])
    assert medians == pytest.approx([0.0, math.log(2), 0.0])
    assert variances[0] == 0 and variances[1] > 0 and variances[2] == 0


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [
        *((0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 3, 3.182), (0.05, 4, 2.776), (0.05, 10, 2.228)),
        *((0.01, 5, 4.032), (0.05, math.inf, 1.960), (0.05, 250, 1.969), (0.001, 7, 5.408)),
    ],
)
def test_students_quantiles(level: float, degrees: float, expected: float) -> None:
    assert student_quantile(level, degrees) == pytest.approx(expected, abs=2e-3)
    if math.isfinite(degrees) and degrees < 200:
        assert student_inside(student_quantile(level, degrees), int(degrees)) == pytest.approx(1 - level)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(1.12, 1.09, 1.15), "12 % slower (9.0 to 15 %)"),
        (Ratio(0.9, 0.85, 0.95), "10 % faster (5.0 to 15 %)"),
        (Ratio(1.01, 0.98, 1.04), "no difference in step time (-2.0 to +4.0 %)"),
    ],
)
def test_how_it_is_said(ratio: Ratio, text: str) -> None:
    assert str(ratio) == text


def drifting(random: np.random.Generator, ratio: float, repeats: int) -> list[list[tuple[np.ndarray, ...]]]:
    """Two candidates on a machine that is 15 % faster or slower in each repeat, and differs by 1.5 % within one."""
    drift = random.normal(0, 0.15, repeats)
    return [
        [(np.array([0.02 * factor * math.exp(slow + random.normal(0, 0.015))]),) for slow in drift]
        for factor in (1.0, ratio)
    ]


@pytest.mark.parametrize("repeats", [3, 5])
def test_what_a_repeat_has_in_common_cancels_out(repeats: int) -> None:
    random, trials = np.random.default_rng(0), 400
    numbers = [[str(n) for n in range(repeats)]] * 2

    def found(ratio: float, blocked: bool) -> float:
        times = [StepTimes.of(drifting(random, ratio, repeats), numbers if blocked else ()) for _ in range(trials)]
        return sum(t.ratio(1, 0).verdict != "no difference" for t in times) / trials

    assert found(1.0, blocked=True) <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert found(1.1, blocked=True) > 0.8 > 0.3 > found(1.1, blocked=False)


def test_repeats_are_compared_only_where_all_have_all_of_them() -> None:
    random = np.random.default_rng(0)
    two = drifting(random, 1.0, 3)
    assert StepTimes.of(two, [list("123"), list("312")]).blocks is not None
    for numbers in ([list("123"), list("124")], [list("111")] * 2, [], [list("122")] * 2, [["1", "2", None]] * 2):
        assert StepTimes.of(two, numbers).blocks is None
    shuffled = [two[0], [two[1][2], two[1][0], two[1][1]]]
    assert StepTimes.of(shuffled, [list("123"), list("312")]).ratio(1, 0) == StepTimes.of(two, [list("123")] * 2).ratio(
        1, 0
    )
    absolute = StepTimes.of(two, [list("123")] * 2).median(0)
    assert absolute == StepTimes.of(two).median(0), "a step time itself has all of the noise"


@pytest.mark.parametrize("blocked", [True, False], ids=["repeat by repeat", "all together"])
def test_what_a_sweep_is_said_to_find_it_finds(blocked: bool) -> None:
    """Four times in five: `resolution` on average, and with as many repeats as `repeats_to_find` says."""
    random, trials = np.random.default_rng(3), 300

    def sweep(ratio: float, repeats: int) -> StepTimes:
        runs = [
            [(np.array([0.02 * factor * math.exp(random.normal(0, 0.06))]),) for _ in range(repeats)]
            for factor in (1.0, ratio)
        ]
        return StepTimes.of(runs, [[str(n) for n in range(repeats)]] * 2 if blocked else ())

    needed = sweep(1.0, 100).repeats_to_find(1.1)
    assert needed is not None and 6 < needed < 11, (
        "of 6 % a run, by hand: 2 (1.96 + 0.84)^2 (6 / 9.5)^2 = 6.3, and Student's"
    )
    found = [sweep(1.1, needed).ratio(1, 0).verdict == "slower" for _ in range(trials)]
    assert 0.7 < sum(found) / trials < 0.9, "the larger of two spreads counts, so a little less than the 0.8"

    resolutions = [sweep(1.0, needed).resolution for _ in range(trials)]
    assert 1.08 < float(np.median(resolutions)) < 1.13


def test_no_number_of_repeats_that_is_worth_naming() -> None:
    times = StepTimes.of([[(np.array([x]),) for x in (0.01, 0.1, 1.0)]] * 2)
    assert times.repeats_to_find(1.0001) is None


def test_absurd_step_times_have_absurd_intervals() -> None:
    times = StepTimes.of([[(np.array([x]),) for x in (1e-300, 1.0, 1e300)]] * 2)
    assert times.ratio(0, 1).verdict == "no difference" and math.isfinite(times.ratio(0, 1).high)
    assert math.isfinite(times.median(0)[2]) and math.isfinite(times.resolution)


@pytest.mark.parametrize("candidates", [2, 4, 8])
def test_a_machine_that_slows_down_makes_no_candidate_slower(candidates: int) -> None:
    """Where every other repeat runs backwards, as sweeps do; in the same order every time it would."""
    random, trials, repeats = np.random.default_rng(0), 200, 3

    def found(backwards: bool) -> float:
        count = 0
        for _ in range(trials):
            runs: list[list[Windows]] = [[] for _ in range(candidates)]
            for place in range(candidates * repeats):
                repeat, candidate = divmod(place, candidates)
                if backwards and repeat % 2:
                    candidate = candidates - 1 - candidate
                drift = 0.1 * place / (candidates * repeats)
                runs[candidate].append((np.array([0.01 * math.exp(drift + random.normal(0, 0.005))]),))
            times = StepTimes.of(runs, [list("123")] * candidates)
            fastest = int(np.argmin(times.log_medians))
            count += any(times.ratio(i, fastest).verdict != "no difference" for i in range(candidates))
        return count / trials

    assert found(backwards=True) <= LEVEL and found(backwards=False) > 0.3
