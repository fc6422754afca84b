"""Line charts as SVG, several on a page; no dependencies."""
import math
from html import escape

COLORS = ["#b3261e", "#c77700", "#1b6e3c", "#2457a6"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 260, 56, 16, 34, 44


def _ticks(low, high, log):
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**p * m for p in range(first, last + 1) for m in (1, 2, 5) if low <= 10.0**p * m <= high * 1.0001]
    step = 10 ** math.floor(math.log10(high - low))
    for finer in (1, 0.5, 0.25, 0.2):
        if (high - low) / (step * finer) >= 4:
            step *= finer
            break
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _text(x, y, text, size=11, anchor="middle", color="#333", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" {more}>{escape(text)}</text>'


class Chart:
    """Lines of (x, y) points by name, drawn in the order given."""

    def __init__(self, title, x, y, *, log=False, low=None, high=None, marks=()):
        self.title, self.x, self.y, self.log, self.low, self.high, self.marks = title, x, y, log, low, high, marks
        self.lines = []

    def line(self, name, points):
        self.lines.append((name, points))
        return self

    def draw(self, left, top, width=WIDTH, height=HEIGHT):
        xs = [p[0] for _, points in self.lines for p in points]
        ys = [p[1] for _, points in self.lines for p in points]
        low = min(ys) if self.low is None else self.low
        high = max(ys) if self.high is None else self.high
        scale = math.log10 if self.log else float
        x0, x1 = scale(min(xs)), scale(max(xs))
        plot_w, plot_h = width - LEFT - RIGHT, height - TOP - BOTTOM

        def at(x, y):
            return (left + LEFT + (scale(x) - x0) / (x1 - x0 or 1) * plot_w,
                    top + TOP + (1 - (y - low) / (high - low or 1)) * plot_h)

        out = [_text(left + LEFT, top + 18, self.title, 13, "start", "#111", 'font-weight="600"')]
        for tick in _ticks(low, high, False):
            x, y = at(min(xs), tick)
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + plot_w:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
            out.append(_text(x - 6, y + 4, f"{tick:g}", anchor="end"))
        last = -100.0
        for tick in _ticks(min(xs), max(xs), self.log):
            x, y = at(tick, low)
            if x - last < 26:
                continue
            last = x
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}" stroke="#999"/>')
            out.append(_text(x, y + 17, f"{tick:g}" if tick < 10000 else f"{tick / 1000:g}k"))
        for mark in self.marks:
            x, y = at(mark, low)
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{top + TOP}" stroke="#888" stroke-dasharray="3 3"/>')
        out.append(_text(left + LEFT + plot_w / 2, top + height - 8, self.x))
        out.append(_text(left + 14, top + TOP + plot_h / 2, self.y,
                         more=f'transform="rotate(-90 {left + 14:.1f} {top + TOP + plot_h / 2:.1f})"'))
        for (name, points), color in zip(self.lines, COLORS):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        return "\n".join(out)


def page(title, charts, *, columns=2, notes=(), width=WIDTH, height=HEIGHT):
    """One SVG: a title, a legend of the first chart's lines, the charts, and lines of text under them."""
    rows = -(-len(charts) // columns)
    total_w, total_h = columns * width, 64 + rows * height + 16 * len(notes) + 12
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" width="{total_w}" height="{total_h}" '
           'font-family="system-ui, sans-serif">', f'<rect width="{total_w}" height="{total_h}" fill="#fff"/>',
           _text(16, 24, title, 16, "start", "#111", 'font-weight="600"')]
    x = 16.0
    for (name, _), color in zip(charts[0].lines, COLORS):
        out.append(f'<line x1="{x}" y1="44" x2="{x + 22}" y2="44" stroke="{color}" stroke-width="3"/>')
        out.append(_text(x + 28, 48, name, 12, "start"))
        x += 44 + 7.0 * len(name)
    for i, chart in enumerate(charts):
        out.append(chart.draw(i % columns * width, 60 + i // columns * height, width, height))
    for i, note in enumerate(notes):
        out.append(_text(16, 64 + rows * height + 14 + 16 * i, note, 11, "start", "#555"))
    return "\n".join(out + ["</svg>", ""])
