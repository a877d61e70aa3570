// A chart: lines of all chosen runs, marks of the run in focus, figures at the cursor.
"use strict";

/** Settings of all charts, as the controls have them. */
const axes = { along: "step", logx: false, logy: false, weight: "auto" };

const MARKS = {
  checkpoint: ["Checkpoint", "--soft"],
  spike: ["Spike", "--bad"],
  rollback: ["Rollback", "--bad"],
  hang: ["Hang", "--tint"],
  collapse: ["Idle expert", "--tint"],
  restart: ["Restart", "--accent"],
  layout: ["Change of layout", "--accent"],
};

let colors = {};

/** Reads the colours of the page, which change with its scheme. */
function readColors() {
  const names = ["--ink", "--soft", "--line", "--sheet", "--bad", "--accent", "--tint"];
  colors = Object.fromEntries(names.map((name) => [name, colorOf(`var(${name})`)]));
  for (const run of runs.values()) [run.stroke, run.faint] = [colorOf(run.color), colorOf(run.color, 0.45)];
}

class Chart {
  constructor(kind) {
    this.kind = kind;
    this.told = kind.told ?? number;
    this.readout = make("p.readout");
    this.place = make("div.plot", { tabindex: "0", role: "img" });
    this.key = make("p.marks", { hidden: true });
    this.figure = make(kind.wide ? "figure.wide" : "figure",
      make("figcaption", make("h3", kind.title), make("span.unit", kind.unit), this.readout), this.place, this.key);
    this.isSeen = true;
    this.isStale = true;
  }

  /** Makes the plot anew for these runs. */
  build(shown) {
    this.plot?.destroy();
    this.range = [1, 10];
    this.shown = shown.filter((run) => this.kind.names.some((name) => run.series.has(name)));
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colors["--soft"], font, ticks: { show: false }, grid: { stroke: colors["--line"], width: 1 } };
    const isLog = axes.logy && this.kind.isLog;
    this.lines = this.makeLines();
    this.width = Math.max(this.place.clientWidth, 200);
    this.plot = new uPlot({
      width: this.width,
      height: this.kind.wide ? (this.width < 500 ? 260 : 340) : 200,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false }, y: false, bind: { dblclick: () => null } },
      scales: {
        x: { time: false, distr: axes.logx ? 3 : 1, auto: false },
        y: { distr: isLog ? 3 : 1, range: () => this.range },
      },
      axes: [
        { ...axis, size: 26, gap: 4, grid: { show: false }, splits: (u, i, low, high) => this.ticksAlong(low, high),
          values: (u, ticks) => ALONG[axes.along].ticks(ticks), filter: (u, ticks) => ticks },
        { ...axis, size: 56, gap: 6, splits: (u, i, low, high) => this.ticksUp(low, high, isLog),
          values: (u, ticks) => this.tickWords(ticks), filter: (u, ticks) => ticks },
      ],
      series: [{}, ...this.lines.map((line) => line.options)],
      hooks: { drawClear: [(u) => this.drawMarks(u)] },
    }, null, this.place);
    bindPointer(this);
    this.isStale = true;
  }

  /** Lines from back to front: all figures of a run are faint behind their moving mean; validations are points. */
  makeLines() {
    const [first, second] = this.kind.names;
    const isSmooth = !this.kind.isExact && axes.weight !== 0;
    const few = this.shown.length <= 3;
    const thin = this.shown.length > 8 ? 1 : 1.5;  // browsers draw a line of one pixel several times as fast as a wider one
    const ordered = [...this.shown].sort((a, b) => (a.id === focus) - (b.id === focus));
    const lines = [];
    const add = (run, name, weight, options) => run.series.has(name) && lines.push({ run, name, weight, options: {
      width: 1.5, spanGaps: false, points: { show: false }, ...options } });
    for (const run of ordered) if (isSmooth && (few || run.id === focus)) add(run, first, 0, { stroke: run.faint, width: 1 });
    for (const run of ordered) {
      const points = { show: true, size: 5, fill: run.stroke, stroke: run.stroke, filter: (u, i) => this.someOf(u, i) };
      const width = run.id === focus && this.shown.length > 1 ? 2.25 : thin;
      add(run, first, isSmooth ? axes.weight : 0, { stroke: run.stroke, width, ...(this.kind.hasPoints && { points }) });
      if (second) add(run, second, 0, { stroke: run.stroke, dash: [4, 4], width: Math.min(thin, 1.25), points });
    }
    return lines;
  }

  /** Indices of the points that are drawn: none if they would form a band. */
  someOf(u, index) {
    const found = [];
    u.data[index].forEach((value, i) => { if (value !== undefined && value !== null) found.push(i); });
    return found.length * 7 < this.width ? found : [];
  }

  ticksAlong(low, high) {
    const most = Math.max(2, Math.floor(this.width / (axes.along === "seconds" ? 110 : 85)));
    return axes.logx ? logTicks(low, high, most) : linearTicks(low, high, most, axes.along === "seconds" ? TIMES : null);
  }

  ticksUp(low, high, isLog) {
    const most = this.kind.wide ? 8 : 5;
    return isLog ? logTicks(low, high, most) : linearTicks(low, high, most, this.told === duration ? TIMES : null);
  }

  /** Words for ticks, all with as many decimals as their distance needs. */
  tickWords(ticks) {
    if (this.told === duration) return timeTicks(ticks);
    if (this.told === percent) return ticks.map((tick) => `${Number((100 * tick).toPrecision(4))}${THIN}%`);
    if (this.told === rate) return ticks.map((tick) => short(tick));
    const most = Math.max(...ticks.map(Math.abs));
    if (most >= 1e4 || most < 2e-3) return ticks.map((tick) => (most >= 1e4 ? short(tick) : tick === 0 ? "0" : String(Number(tick.toPrecision(3)).toExponential())));
    return ticks.map((tick) => String(Number(tick.toPrecision(6))));
  }

  /** Draws the part of all lines between two places. */
  draw(low, high) {
    const pixels = this.plot.bbox.width / devicePixelRatio;
    const isFull = this.lines.length > 15;
    const coarse = isFull ? (this.lines.length > 30 ? 3 : 2) * devicePixelRatio : 1;  // lines of several device pixels are slow
    const grid = gridOf(low, high, pixels / coarse, axes.logx);
    const data = [grid.xs];
    for (const { run, name, weight } of this.lines) {
      const series = run.series.get(name);
      const xs = run.along(name, axes.along);
      data.push(grid.thin(xs, series.smoothed(weight)));
      if (name !== this.kind.names[0] && series.steps.view()[0] === 0) cutAfterFirst(data.at(-1), grid, xs);
    }
    this.range = this.rangeOf(data);
    this.plot.batch(() => {
      this.plot.setData(data, false);
      this.plot.setScale("x", { min: low, max: high });
    });
    this.isStale = false;
  }

  /** Smallest and largest figure of the vertical axis. Single outliers of noisy figures do not count. */
  rangeOf(data) {
    const isLog = axes.logy && this.kind.isLog;
    let [low, high] = [Infinity, -Infinity];
    for (const [i, { weight }] of this.lines.entries()) {
      const values = data[i + 1];
      if (this.kind.isNoisy && !weight && this.lines.length > 1) continue;
      for (const value of values) {
        if (value === undefined || value === null || (isLog && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (!(low <= high)) return isLog ? [1, 10] : [0, 1];
    if (isLog) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
    if (this.kind.isFromZero) return [0, high * (this.kind.isNoisy ? 1.3 : 1.08) || 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  /** Marks of the run in focus: lines for events, and short ticks at the bottom for checkpoints. */
  drawMarks(u) {
    const { ctx, bbox } = u;
    const run = focused();
    const kinds = new Set();
    ctx.save();
    for (const mark of run?.parts.marks ?? []) {
      const x = run.place(mark.step, axes.along);
      if (!(x >= u.scales.x.min && x <= u.scales.x.max) || !MARKS[mark.kind]) continue;
      const left = Math.round(u.valToPos(x, "x", true));
      const isTick = mark.kind === "checkpoint";
      ctx.strokeStyle = ctx.fillStyle = colors[MARKS[mark.kind][1]];
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(isTick ? [] : [2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left + 0.5, bbox.top + bbox.height - (isTick ? 7 * devicePixelRatio : bbox.height));
      ctx.lineTo(left + 0.5, bbox.top + bbox.height);
      ctx.stroke();
      if (!isTick) shape(ctx, mark.kind, left, bbox.top, 4.5 * devicePixelRatio);
      kinds.add(mark.kind);
    }
    ctx.restore();
    this.showKey(kinds);
  }

  showKey(kinds) {
    const key = [...kinds].sort().join(" ");
    if (!this.kind.wide || this.key.dataset.kinds === key) return;
    this.key.dataset.kinds = key;
    this.key.hidden = !key;
    this.key.replaceChildren(...Object.keys(MARKS).filter((kind) => kinds.has(kind)).map((kind) =>
      make("span", make("i", { "--mark": `var(${MARKS[kind][1]})`, "data-kind": kind }), MARKS[kind][0])));
  }

  /** Figure of a run at a place, as words. */
  valueAt(run, name, x) {
    const series = run.series.get(name);
    if (!series) return NaN;
    const values = series.smoothed(name === this.kind.names[0] && !this.kind.isExact ? axes.weight : 0);
    if (x === null) return values.findLast(Number.isFinite) ?? NaN;
    return values[nearest(run.along(name, axes.along), x)] ?? NaN;
  }

  /** Shows the figures at the cursor, or the last ones. */
  read(x) {
    const run = this.shown.includes(focused()) ? focused() : this.shown.at(-1);
    if (!run) return;
    const words = this.kind.names.filter((name) => run.series.has(name)).map((name, i) => `${i ? "validation " : ""}${this.told(this.valueAt(run, name, x))}`);
    say(this.readout, `${x === null ? "" : `${ALONG[axes.along].told(placeOf(run, this.kind, x))}: `}${words.join(", ")}`);
  }

  /** Text in place of the picture: the last figures of all runs. */
  describe() {
    const told = this.shown.map((run) => `${this.shown.length > 1 ? `${run.name}: ` : ""}${this.kind.names
      .filter((name) => run.series.has(name))
      .map((name) => `${name.replace(/_/g, " ")} ${this.told(run.last(name))}`).join(", ")} at step ${whole.format(run.lastStep())}`);
    const words = `Chart: ${this.kind.title}${this.kind.unit && `, ${this.kind.unit}`}. ${told.join("; ")}.`;
    if (this.place.getAttribute("aria-label") !== words) this.place.setAttribute("aria-label", words);
  }
}

/** Ends the line after the validation before the first step: between it and the next one, nothing is known. */
function cutAfterFirst(values, grid, xs) {
  if (xs[0] >= grid.xs[0]) {
    const after = values.findIndex(Number.isFinite) + 1;
    if (values[after] === undefined) values[after] = null;
  } else if (xs[1] >= grid.xs[0]) values[0] = null;
  if (xs[1] > grid.xs.at(-1)) values[values.length - 1] = null;
  spread(values);
}

/** Place of the figure that is nearest to `x`. */
function placeOf(run, kind, x) {
  const xs = run.along(kind.names.find((name) => run.series.has(name)), axes.along);
  return xs[nearest(xs, x)] ?? x;
}

/** Sign of a mark at the top of its line. */
function shape(ctx, kind, x, y, size) {
  ctx.setLineDash([]);
  ctx.beginPath();
  if (kind === "spike") [[0, -size], [size, size], [-size, size]].forEach(([dx, dy], i) => ctx[i ? "lineTo" : "moveTo"](x + dx, y + size + dy));
  else if (kind === "rollback") [[size, 0], [size, 2 * size], [-size, size]].forEach(([dx, dy]) => ctx.lineTo(x + dx, y + dy));
  else if (kind === "restart") ctx.arc(x, y + size, size * 0.9, 0, 2 * Math.PI);
  else if (kind === "layout") [[0, 0], [size, size], [0, 2 * size], [-size, size]].forEach(([dx, dy]) => ctx.lineTo(x + dx, y + dy));
  else ctx.rect(x - size * 0.8, y + size * 0.2, size * 1.6, size * 1.6);
  ctx.fill();
}
