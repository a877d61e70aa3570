// Columns of numbers that grow: steps, figures, and their moving means.
"use strict";

function decode(text, Kind) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return new Kind(found.buffer);
}

/** Numbers with room for more. `view()` is valid until the next `push`. */
class Column {
  constructor() {
    this.length = 0;
    this.room = new Float64Array(1024);
  }

  push(values) {
    if (this.length + values.length > this.room.length) {
      const larger = new Float64Array(Math.max(2 * this.room.length, this.length + values.length));
      larger.set(this.view());
      this.room = larger;
    }
    this.room.set(values, this.length);
    this.length += values.length;
  }

  view() { return this.room.subarray(0, this.length); }

  last() { return this.length ? this.room[this.length - 1] : NaN; }
}

/** First index in ascending `values` whose value is not below `bound`. */
function lowerBound(values, bound, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < bound) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Index of the value in ascending `values` that is nearest to `wanted`. -1 if there is none. */
function nearest(values, wanted) {
  const after = lowerBound(values, wanted);
  if (after === values.length) return after - 1;
  return after > 0 && wanted - values[after - 1] < values[after] - wanted ? after - 1 : after;
}

/** Value at `x` on the line through the points (xs, ys), continued at its ends. */
function interpolated(xs, ys, x) {
  if (!xs.length) return NaN;
  const after = Math.min(Math.max(lowerBound(xs, x), 1), xs.length - 1);
  if (xs.length === 1 || xs[after] === xs[after - 1]) return ys[Math.min(after, ys.length - 1)];
  const share = (x - xs[after - 1]) / (xs[after] - xs[after - 1]);
  return ys[after - 1] + share * (ys[after] - ys[after - 1]);
}

/** Figures of one name over the steps. `steps` ascend. */
class Series {
  constructor() {
    this.steps = new Column();
    this.values = new Column();
    this.means = new Column();
    this.weight = -1;
    this.along = new Map();
  }

  push(steps, values) {
    this.steps.push(steps);
    this.values.push(values);
  }

  /** Weight of the past: `wanted` or, for "auto", a mean over a 25th of the figures, but over at most 20. */
  weightFor(wanted) {
    return wanted === "auto" ? Math.max(0, Math.min(0.95, 1 - 25 / this.values.length)) : wanted;
  }

  /**
   * Exponential moving mean with the weight of the past `wanted`. The mean is divided by the sum of its weights, so that
   * its beginning is not drawn towards 0. Figures that are not finite are left out.
   */
  smoothed(wanted) {
    const weight = this.weightFor(wanted);
    if (weight <= 0) return this.values.view();
    if (weight !== this.weight) [this.weight, this.mean, this.total, this.means] = [weight, 0, 0, new Column()];
    const values = this.values.view();
    const added = new Float64Array(values.length - this.means.length);
    for (let i = 0, from = this.means.length; i < added.length; i++) {
      const value = values[from + i];
      if (Number.isFinite(value)) {
        this.mean = weight * this.mean + (1 - weight) * value;
        this.total = weight * this.total + (1 - weight);
      }
      added[i] = Number.isFinite(value) ? this.mean / this.total : NaN;
    }
    this.means.push(added);
    return this.means.view();
  }
}
