"""How the report page looks, in light and dark. Knows nothing of what stands on it."""

from unalike.report.mpl import variables

LAYOUT = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--desk); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -0.02em; margin: 0.2rem 0 0.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; letter-spacing: -0.01em; margin: 0; }
.kind { color: var(--soft); font-size: 0.85rem; margin: 0; overflow-wrap: anywhere; }
.summary { color: var(--soft); margin: 0 0 1.4rem; max-width: 46rem; overflow-wrap: anywhere; }
.verdict { font-size: 1.3rem; line-height: 1.45; margin: 1.2rem 0 1.6rem; padding-left: 1rem; border-left: 4px solid var(--good);
  max-width: 50rem; overflow-wrap: anywhere; }
.verdict.lost { border-color: var(--bad); } .verdict.open { border-color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: 1px; background: var(--rule); border: 1px solid var(--rule); border-radius: 10px;
  overflow: hidden; margin: 0 0 1.5rem; }
.facts div { flex: 1 1 auto; background: var(--paper); padding: 0.8rem 1rem; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; letter-spacing: -0.01em;
  white-space: nowrap; }
.facts dd small { display: block; font-size: 0.8rem; font-weight: 400; color: var(--soft); letter-spacing: 0; white-space: normal;
  overflow-wrap: anywhere; min-width: 5rem; }
section, figure, details { background: var(--paper); border: 1px solid var(--rule); border-radius: 10px; padding: 1.25rem 1.4rem;
  margin: 0 0 1.5rem; }
figure h2 + .legend { margin-top: 0.35rem; }
.wide { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 38rem; height: auto; margin-top: 0.9rem; }
figure svg text { font-family: inherit !important; font-variant-numeric: tabular-nums; }
figure img { display: block; max-width: 100%; margin: 0.9rem auto 0; background: #fff; border-radius: 6px; }
figcaption, .small { color: var(--soft); font-size: 0.88rem; margin: 0.7rem 0 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; margin: 0; padding: 0; font-size: 0.88rem;
  color: var(--soft); }
.legend li { overflow-wrap: anywhere; }
.mark { display: inline-block; vertical-align: middle; margin: 0 0.45em 0.15em 0; width: 0.7em; height: 0.7em; color: var(--tone);
  background: currentColor; border-radius: 50%; flex: none; }
.mark.ring { background: none; border: 2px solid; } .mark.square { border-radius: 2px; }
.mark.diamond { background: none; border: 1.5px solid; border-radius: 0; transform: rotate(45deg) scale(0.85); }
.mark.line, .mark.dash { width: 1.5em; height: 0; background: none; border-top: 2.5px solid; border-radius: 0; }
  .mark.dash { border-top-style: dashed; }
table { border-collapse: collapse; width: 100%; margin-top: 0.9rem; font-size: 0.95rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; font-size: 0.82rem; color: var(--soft); padding: 0.3rem 0.9rem 0.45rem 0;
  border-bottom: 1px solid var(--rule); vertical-align: bottom; }
td { padding: 0.5rem 0.9rem 0.5rem 0; border-bottom: 1px solid var(--rule); overflow-wrap: break-word; max-width: 18rem; }
tbody tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; white-space: nowrap; } th:last-child, td:last-child { padding-right: 0; }
td:first-child { font-weight: 600; min-width: 6rem; }
.tall { max-height: 42rem; overflow-y: auto; } .tall thead th { position: sticky; top: 0; background: var(--paper); }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
td.good, td.bad { font-weight: 600; }
summary { cursor: pointer; font-weight: 600; } details[open] > summary { margin-bottom: 0.8rem; }
pre { margin: 0.6rem 0 0; padding: 0.9rem 1rem; background: var(--desk); border-radius: 7px; overflow-x: auto;
  font: 0.85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
ul.failures { margin: 0.7rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
@media print { body { background: none; } main { padding: 0; } .tall { max-height: none; }
  section, figure, details { break-inside: avoid; } }
"""


def css() -> str:
    """The whole style sheet."""
    light, dark = f"--desk: #f4f6f8; {variables(False)}", f"--desk: #0f1318; {variables(True)}"
    return f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{LAYOUT}"
