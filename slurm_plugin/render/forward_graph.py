"""A model's forward as an inline drawing: which lines run in data workers, which in the trainer. Pure.

The operators of one line of the program are one box. What runs in data workers stands to the left in a dashed box, what
runs in the trainer to the right; arrows that cross are values that are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from hetstream.base.text import size_words
from hetstream.mpi_dataworkers.partitioner.cut import Decision, OperatorCost
from hetstream.mpi_dataworkers.partitioner.program import ForwardGraph, Kind, Operator

_WIDTH, _HEIGHT, _GAP, _LEFT, _RIGHT = 360, 46, 14, 20, 440
_MOST_CHARS = 48
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.head{font-weight:600}.small{fill:#666}"
    "rect{fill:#fff;stroke:#333}.moved{stroke-dasharray:6 3;fill:#eef4fb}"
    "path{fill:none;stroke:#888}.sent{stroke:#b3541e;stroke-width:2}"
)

Box = tuple[bool, str]  # whether data workers run it, and the line of the program


def draw(graph: ForwardGraph, costs: Mapping[str, OperatorCost], decision: Decision) -> str:
    """The drawing as SVG; a file of its own."""
    boxes: dict[Box, list[Operator]] = {}
    of_operator: dict[str, Box] = {}
    for operator in graph.operators:
        if operator.kind is Kind.OPERATOR:
            box = (operator.name in decision.moved, operator.line or "the model")
            boxes.setdefault(box, []).append(operator)
            of_operator[operator.name] = box
    tops = {box: 40 + index * (_HEIGHT + _GAP) for index, box in enumerate(boxes)}
    arrows = (
        {
            (of_operator[name], box): name in decision.sent and not box[0]
            for operator_name, box in of_operator.items()
            for name in graph.by_name()[operator_name].inputs
            if name in of_operator and of_operator[name] != box
        }
        if boxes
        else {}
    )
    parts = [_arrow(tops, tail, head, is_sent) for (tail, head), is_sent in arrows.items()]
    parts += [_box(tops[box], box, operators, costs) for box, operators in boxes.items()]
    height = 60 + len(boxes) * (_HEIGHT + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_RIGHT + _WIDTH + 20}" height="{height}" role="img">'
        f"<title>{escape(decision.reason)}</title><style>{_STYLE}</style>"
        f'<text class="head" x="{_LEFT}" y="22">data workers</text>'
        f'<text class="head" x="{_RIGHT}" y="22">trainer</text>{"".join(parts)}</svg>\n'
    )


def _x(box: Box) -> int:
    return _LEFT if box[0] else _RIGHT


def _arrow(tops: Mapping[Box, int], tail: Box, head: Box, is_sent: bool) -> str:
    x1, y1 = _x(tail) + _WIDTH // 2, tops[tail] + _HEIGHT
    x2, y2 = _x(head) + _WIDTH // 2, tops[head]
    bend = 20 if y2 > y1 else 60
    kind = ' class="sent"' if is_sent else ""
    return f'<path{kind} d="M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}"/>'


def _box(top: int, box: Box, operators: list[Operator], costs: Mapping[str, OperatorCost]) -> str:
    is_moved, line = box
    source = next((operator.source for operator in operators if operator.source), operators[0].target)
    seconds = sum(costs[operator.name].trainer_s for operator in operators if operator.name in costs)
    num_bytes = costs[operators[-1].name].value_bytes if operators[-1].name in costs else 0
    figures = f"{1e3 * seconds:.2f} ms, {size_words(num_bytes)}" if seconds else "not measured"
    number = "1 operator" if len(operators) == 1 else f"{len(operators)} operators"
    shown = source if len(source) <= _MOST_CHARS else source[: _MOST_CHARS - 3] + "..."
    x, kind = _x(box), "moved" if is_moved else "stays"
    return (
        f'<rect class="{kind}" x="{x}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="3"/>'
        f'<text x="{x + 8}" y="{top + 18}">{escape(shown)}</text>'
        f'<text class="small" x="{x + 8}" y="{top + 36}">{escape(line)}: {number}, {figures}</text>'
    )
