"""The page around every HTML report: its style, light, dark and printed, and a policy that lets nothing be loaded."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --fg:#1c2024; --dim:#5c6570; --bg:#ffffff; --card:#f5f6f8; --line:#d9dde2;
  --a:#2a6fdb; --b:#d9622b; --bad:#c62f3d; --good:#1f7a4d; --estimate:#8a5cc9; }
@media (prefers-color-scheme: dark) { :root { --fg:#e6e9ed; --dim:#9aa4b0; --bg:#14171a; --card:#1d2125; --line:#363c43;
  --a:#6ea8ff; --b:#ff9a63; --bad:#ff7480; --good:#5fcf98; --estimate:#b996f0; } }
* { box-sizing:border-box } body { margin:0 auto; max-width:1120px; padding:24px; background:var(--bg); color:var(--fg);
  font:15px/1.5 system-ui,sans-serif }
h1 { font-size:22px; margin:0 0 4px }
h2 { font-size:17px; margin:32px 0 8px } p { margin:6px 0 } .dim { color:var(--dim) }
code,td.n,td.k { font-family:ui-monospace,monospace; font-size:13px; overflow-wrap:anywhere }
.verdict { padding:10px 14px; border-left:5px solid var(--good); background:var(--card); font-weight:600 }
.verdict.bad { border-color:var(--bad) } .sides { display:grid; grid-template-columns:auto 1fr; gap:2px 12px }
.tag { font-weight:700 } .tag.a { color:var(--a) } .tag.b { color:var(--b) } ul { padding-left:20px; margin:6px 0 }
.scroll { overflow-x:auto } table { border-collapse:collapse; width:100%; margin:8px 0 } th { text-align:left }
th,td { padding:3px 10px 3px 0; border-bottom:1px solid var(--line); vertical-align:top } td.n { text-align:right }
th.n { text-align:right } tr.bad td.k { color:var(--bad) } details { margin:8px 0 } summary { cursor:pointer }
svg { width:100%; height:auto; background:var(--card); border-radius:6px; margin:6px 0 }
svg text { fill:var(--dim); font:11px system-ui,sans-serif } .grid,.axis { stroke:var(--line) }
polyline { fill:none; stroke-width:1.8 } polyline.a { stroke:var(--a) }
polyline.b { stroke:var(--b); stroke-dasharray:6 4 }
polyline.d { stroke:var(--bad) } circle.a { fill:var(--a) } circle.b { fill:var(--b) } circle.d { fill:var(--bad) }
.stem line { stroke:currentColor; opacity:.45 } .stem .bar { stroke-width:3; opacity:.6 }
.stem circle { fill:currentColor }
.stem.exact { color:var(--a) } .stem.estimated { color:var(--estimate) } .stem.equal { color:var(--good) }
.stem.undefined { color:var(--bad) } .rule { stroke:var(--dim); stroke-dasharray:4 4 }
.legend span { margin-right:16px } .legend i { display:inline-block; width:10px; height:10px; border-radius:5px;
  margin-right:5px }
"""


def document(title: str, body: str, style: str = "") -> str:
    """One self-contained page. `title` and `body` are markup already."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"  # even text that slipped through could load nothing
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{style}</style></head><body>{body}</body></html>\n"
    )
