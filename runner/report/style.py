"""How report.html looks: one style sheet, in light and dark, with nothing to fetch."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1d1f23; --soft: #5a5f68; --rule: #dcdde1; --on: #ffffff;
  --good: #22723f; --bad: #b02a37; --wait: #8a5a00;
  --s0: #2b62b0; --s1: #2c7a4b; --s2: #b8560f; --s3: #6f7681; --s4: #7b4db5; --s5: #0b7880; --s6: #b03a5b; --s7: #846800;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131519; --card: #1b1e24; --ink: #e7e8eb; --soft: #a2a8b2; --rule: #343943; --on: #14161a;
    --good: #74cf97; --bad: #f28b94; --wait: #e3b75a;
    --s0: #74a9f5; --s1: #6fc593; --s2: #eda05c; --s3: #8d95a2; --s4: #b89bf0; --s5: #5fc6cd; --s6: #ef8bab; --s7: #d6b54f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
main, header, footer { max-width: 1000px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; }
header p, section > p { color: var(--soft); margin: 2px 0 10px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
section { padding: 16px 20px; margin: 16px 0; }
.state { font-weight: 600; }
.finished { color: var(--good); } .failed { color: var(--bad); } .running, .stopped { color: var(--wait); }
dl.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; margin: 18px 0 0; }
dl.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
dl.figures dt { color: var(--soft); font-size: 13px; }
dl.figures dd { margin: 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
dl.figures dd small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
.chart { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 560px; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; font-variant-numeric: tabular-nums; }
svg text.inside { fill: var(--on); font-weight: 600; }
.axis { stroke: var(--soft); stroke-width: 1; } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.area { fill: currentColor; opacity: .13; } .bar, .dot { fill: currentColor; }
.target { fill: transparent; } .target:hover { fill: var(--ink); }
.bar:hover { opacity: .8; }
.series-0 { color: var(--s0); } .series-1 { color: var(--s1); } .series-2 { color: var(--s2); }
.series-3 { color: var(--s3); } .series-4 { color: var(--s4); } .series-5 { color: var(--s5); }
.series-6 { color: var(--s6); } .series-7 { color: var(--s7); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 8px 0 0; }
.legend { font-size: 13px; color: var(--soft); }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.swatch { background: currentColor; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: 4px 0; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; }
th.number, td.number { text-align: right; padding: 5px 0 5px 14px; }
tbody tr:last-child > * { border-bottom: 0; }
td { overflow-wrap: break-word; }
th.number, td.number, tbody th { white-space: nowrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); font-size: 13px; }
details .scroll { max-height: 340px; overflow-y: auto; margin-top: 6px; }
pre { overflow: auto; max-height: 420px; font-size: 12px; line-height: 1.45; }
code { font-size: 13px; }
.cores { display: flex; flex-wrap: wrap; gap: 4px; list-style: none; padding: 0; margin: 6px 0 12px; }
.cores li { min-width: 58px; border: 1px solid var(--rule); border-radius: 6px; padding: 2px 8px; }
.cores li { font-size: 12px; line-height: 1.35; }
.cores b { display: block; color: var(--ink); font-variant-numeric: tabular-nums; }
.cores span { display: block; color: var(--soft); white-space: nowrap; }
.cores .off { border-color: var(--bad); } .cores .off span { color: var(--bad); }
.as-asked { color: var(--good); } .not-as-asked { color: var(--bad); }
footer { color: var(--soft); font-size: 13px; padding-bottom: 32px; }
@media print { section { break-inside: avoid; } details { display: none; } }
"""
