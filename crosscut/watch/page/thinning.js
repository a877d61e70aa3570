// Lines with at most two points for each pixel: the smallest and the largest figure there, in their order.
"use strict";

const LINEAR = { to: (x) => x, from: (x) => x };
const LOG = { to: Math.log, from: Math.exp };

/** Horizontal grid that all lines of a chart share: two places for each of `width` pixels, and one beside each edge. */
class Grid {
  constructor(low, high, width, isLog) {
    const scale = isLog ? LOG : LINEAR;
    const [from, to] = [scale.to(low), scale.to(high)];
    this.width = Math.max(1, Math.floor(width));
    this.edges = new Float64Array(this.width + 1);
    for (let i = 1; i < this.width; i++) this.edges[i] = scale.from(from + ((to - from) * i) / this.width);
    [this.edges[0], this.edges[this.width]] = [low, high];
    this.xs = [low];
    for (let i = 0; i < 2 * this.width; i++) this.xs.push(scale.from(from + ((to - from) * (i + 0.5)) / (2 * this.width)));
    this.xs.push(high);
  }

  /** Figures of a line at the places of the grid: undefined where there is none, null where it is not finite. */
  thin(xs, ys) {
    const found = new Array(this.xs.length);
    if (!xs.length) return found;
    let start = lowerBound(xs, this.edges[0]);
    if (start > 0 && start < xs.length) found[0] = this.between(xs, ys, start, this.edges[0]);
    for (let i = 0; i < this.width; i++) {
      const edge = this.edges[i + 1];
      const end = i + 1 === this.width ? this.after(xs, edge, start) : this.next(xs, edge, start);
      if (end > start) this.place(found, 2 * i + 1, ys, start, end);
      start = end;
    }
    if (start > 0 && start < xs.length) found[found.length - 1] = this.between(xs, ys, start, this.edges[this.width]);
    return spread(found);
  }

  /** First index from `start` on whose x is not below `edge`. The search begins with the nearest points. */
  next(xs, edge, start) {
    let step = 1;
    while (start + step < xs.length && xs[start + step] < edge) step *= 2;
    return lowerBound(xs, edge, start + (step >> 1), Math.min(start + step + 1, xs.length));
  }

  after(xs, edge, start) {
    let end = this.next(xs, edge, start);
    while (end < xs.length && xs[end] === edge) end++;
    return end;
  }

  place(found, index, ys, start, end) {
    let [least, most] = [-1, -1];
    for (let i = start; i < end; i++) {
      const y = ys[i];
      if (y - y !== 0) continue;  // not finite
      if (least < 0 || y < ys[least]) least = i;
      if (most < 0 || y > ys[most]) most = i;
    }
    if (least < 0) found[index] = null;
    else if (least === most) found[index] = ys[least];
    else [found[index], found[index + 1]] = least < most ? [ys[least], ys[most]] : [ys[most], ys[least]];
  }

  /** Figure on the line between two points, one before `x` and one not before it. */
  between(xs, ys, after, x) {
    const [a, b] = [ys[after - 1], ys[after]];
    const value = a + ((b - a) * (x - xs[after - 1])) / (xs[after] - xs[after - 1] || 1);
    return Number.isFinite(value) ? value : undefined;
  }
}

/** Ends lines before and after each null, also where the next figure is some places away. */
function spread(values) {
  let gap = values.indexOf(null);
  while (gap >= 0) {
    for (let i = gap - 1; i >= 0 && values[i] === undefined; i--) values[i] = null;
    for (gap++; gap < values.length && (values[gap] ?? null) === null; gap++) values[gap] = null;
    gap = values.indexOf(null, gap);
  }
  return values;
}

let lastGrids = new Map();

/** Grid of charts that have the same width and show the same part. */
function gridOf(low, high, width, isLog) {
  const key = [low, high, width, isLog].join(" ");
  if (!lastGrids.has(key)) {
    if (lastGrids.size > 3) lastGrids = new Map();
    lastGrids.set(key, new Grid(low, high, width, isLog));
  }
  return lastGrids.get(key);
}
