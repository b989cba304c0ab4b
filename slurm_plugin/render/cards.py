"""What HTML pages are made of: the document with its style sheet, cards, tiles and charts in two widths. Pure.

No script, no outside resource: a page opens from a mail, and a browser asks nobody for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from hetstream.base.text import printable
from hetstream.slurm_plugin.render.charts import patterns

# Widths for which each chart is drawn: one for desktops, one for phones. The style sheet shows one of them.
WIDE, NARROW, HEIGHT = 560, 330, 220


def document(title: str, body: str, footer: str = "", refresh_s: int = 0) -> str:
    """A whole page.

    Args:
        title: plain text.
        body: HTML.
        footer: HTML; "" for none.
        refresh_s: the browser loads it again after so many seconds; 0 for never.
    """
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    foot = f"<footer>{footer}</footer>" if footer else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{refresh}<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{patterns()}{body}{foot}</body></html>\n"
    )


def card(title: str, body: str, wide: bool = False) -> str:
    """One thing with its title."""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{body}</section>'


def nothing(text: str) -> str:
    """A line in the place of what is not there."""
    return f'<p class="nothing">{escape(text)}</p>'


def both(draw: Callable[[int], str]) -> str:
    """A chart for desktops and one for phones."""
    return f'<div class="on-wide">{draw(WIDE)}</div><div class="on-narrow">{draw(NARROW)}</div>'


def tiles(shown: Iterable[tuple[str, str, str]]) -> str:
    """Figures in a row: name, value, and a note."""
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(note)}</span></dd></div>"
        for name, value, note in shown
    )
    return f'<dl class="tiles">{inside}</dl>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    """A table; on phones each row is a card of its own.

    Args:
        head: titles of the columns.
        rows: plain values; control characters are written out.
        empty: the line in its place when there are no rows.
    """
    if not rows:
        return nothing(empty)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(name: str, value: object) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f'<td data-label="{escape(name)}"{kind}><span>{escape(printable(str(value)))}</span></td>'


# Colours: Okabe and Ito for lines, orange to blue for the indicator; both can be told apart with any colour vision.
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#f4f5f7;--card:#fff;--rule:#d8dde3;
--s0:#c24e00;--s1:#0072b2;--s2:#a5468a;--s3:#00805c;--s4:#8a6d00;--s5:#6b7280;
--f0:#b35806;--f1:#fdb863;--f2:#e9ebee;--f3:#a6cbea;--f4:#2166ac;--f5:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a4adb8;--paper:#14171b;--card:#1e2329;--rule:#3a424c;
--s0:#ff8a3c;--s1:#5cb8ee;--s2:#e29bcb;--s3:#34c99a;--s4:#e0c341;--s5:#a4adb8;--f2:#4a525c;--f5:#1e2329}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0 0 8px}p{margin:0 0 8px;color:var(--soft)}
header{margin-bottom:12px}
.tiles{display:grid;grid-template-columns:repeat(6,1fr);gap:10px;margin:0 0 12px}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
dt{color:var(--soft);font-size:.85rem}dd{margin:0}dd b{font-size:1.6rem;display:block;line-height:1.2}
dd span{font-size:.8rem;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px;margin:0 0 12px;min-width:0}
@media(min-width:900px){body{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;align-items:stretch}
header,.tiles,.wide,footer{grid-column:1/-1}}
.cells{display:flex;flex-wrap:wrap;gap:4px;margin-bottom:10px}.cell{border-radius:3px;outline:1px solid var(--rule)}
.cell text{text-anchor:middle}.cell .name{font-size:11px}.cell .value{font-size:14px;font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0;padding:0;font-size:.85rem}
.legend svg{vertical-align:-2px;outline:1px solid var(--rule)}
.chart{display:block;width:100%;height:auto}.on-narrow{display:none}
text{font-size:12px;fill:var(--ink)}.tick{fill:var(--soft);font-size:11px}.grid{stroke:var(--rule)}
.line{fill:none;stroke-width:2}.mark{stroke-width:1.5}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}.s5{stroke:var(--s5)}
.mark.s0{fill:var(--s0)}.mark.s1{fill:var(--s1)}.mark.s2{fill:var(--s2)}.mark.s3{fill:var(--s3)}.mark.s4{fill:var(--s4)}.mark.s5{fill:none}
.f0{fill:var(--f0)}.f1{fill:var(--f1)}.f2{fill:var(--f2)}.f3{fill:var(--f3)}.f4{fill:var(--f4)}.f5{fill:var(--f5)}
.on0,.on4{fill:#fff;stroke:#fff}.on1,.on3{fill:#1b1f24;stroke:#1b1f24}.on2,.on5{fill:var(--ink);stroke:var(--ink)}
text[class^=on]{stroke:none}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:5px 8px 5px 0;vertical-align:top}
th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--rule)}
tbody tr+tr td{border-top:1px solid var(--rule)}td[data-label^=Wh]{overflow-wrap:anywhere}
.number{font-variant-numeric:tabular-nums}.nothing{font-style:italic}
footer{color:var(--soft);font-size:.8rem;padding:4px 2px 16px}
@media(max-width:899px){.tiles{grid-template-columns:repeat(3,1fr)}}
@media(max-width:560px){body{padding:10px}.tiles{grid-template-columns:1fr 1fr}.card{padding:10px}
.on-wide{display:none}.on-narrow{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;padding:7px 0}
tbody tr+tr{border-top:1px solid var(--rule)}tbody tr+tr td{border:0}
td{display:flex;gap:6px;padding:1px 0;min-width:0}td span{min-width:0;overflow-wrap:anywhere}
td::before{content:attr(data-label);color:var(--soft);flex:none}
td:first-child,td[data-label^=Wh]{grid-column:1/-1}td:first-child span{font-weight:600}
td[data-label^=Wh]{display:block}td[data-label^=Wh]::before{content:attr(data-label) ": "}}
@media print{body{background:#fff}.card,.tiles div{break-inside:avoid}}
""".replace("\n", "")
