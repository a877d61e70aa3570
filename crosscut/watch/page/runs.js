// Runs: what the server has told about them, and the question that asks for more.
"use strict";

/** Colours of runs. Neighbours in the list differ in hue, and after twelve runs in lightness. */
const HUES = [185, 45, 265, 345, 110, 15, 230, 300, 75, 150, 205, 325];

function shade(index) {
  const hue = HUES[index % HUES.length];
  const step = Math.floor(index / HUES.length) % 3;
  const [light, dark] = [[0.54, 0.78], [0.42, 0.66], [0.66, 0.88]][step];
  return `light-dark(oklch(${light} 0.12 ${hue}), oklch(${dark} 0.11 ${hue}))`;
}

class Run {
  constructor(id, index) {
    this.id = id;
    this.color = shade(index);
    this.listed = {};
    this.parts = {};
    this.forget();
  }

  /** Drops all figures, because the run has rewritten its files. */
  forget() {
    this.series = new Map();
    this.cursor = "";
  }

  get name() { return this.listed.name; }

  /** Takes in what the server has sent. Returns the names of what has changed. */
  receive(told) {
    if (told.fresh) this.forget();
    this.cursor = told.cursor;
    const columns = {};
    for (const [key, text] of Object.entries(told.columns)) columns[key] = decode(text, key[0] === "s" ? Float64Array : Float32Array);
    for (const [name, [start, steps, values]] of Object.entries(told.series)) {
      if (!start || !this.series.has(name)) this.series.set(name, new Series());
      this.series.get(name).push(columns[steps], columns[values]);
    }
    Object.assign(this.parts, told.parts);
    return told.fresh || Object.keys(told.series).length > 0 || Object.keys(told.parts).length > 0;
  }

  last(name) { return this.series.get(name)?.values.last() ?? NaN; }

  lastStep() { return Math.max(0, ...[...this.series.values()].map((series) => series.steps.last() || 0)); }

  /** Places of a series' figures along the axis `along`: steps, tokens, or seconds of the steps since the start. */
  along(name, along) {
    const series = this.series.get(name);
    const steps = series.steps.view();
    if (along === "step") return steps;
    const [xs, ys] = this.scale(along);
    const known = series.along.get(along);
    if (known && known.length === steps.length && known.seen === ys.length) return known.places;
    const places = xs === steps ? ys : Float64Array.from(steps, (step) => interpolated(xs, ys, step));
    series.along.set(along, { length: steps.length, seen: ys.length, places });
    return places;
  }

  /** Steps, and tokens or seconds at each of them. */
  scale(along) {
    const series = this.series.get(along === "tokens" ? "samples" : "elapsed_seconds");
    if (!series) return [[0, 1], [0, NaN]];
    const factor = along === "tokens" ? this.listed.tokens_per_sample || 1 : 1;
    const [steps, values] = [series.steps.view(), series.values.view()];
    return [steps, factor === 1 ? values : values.map((value) => value * factor)];
  }

  place(step, along) {
    if (along === "step") return step;
    return interpolated(...this.scale(along), step);
  }
}

const runs = new Map();
let leftOut = 0;
const chosen = new Set();
let focus = null;

const visible = () => [...runs.values()].filter((run) => chosen.has(run.id));
const focused = () => runs.get(focus);

/** Makes the runs of the list. The first ones are chosen until the reader has chosen. */
function list(entries) {
  const isFirst = runs.size === 0;
  for (const entry of entries) {
    if (!runs.has(entry.id)) {
      runs.set(entry.id, new Run(entry.id, runs.size));
      if (isFirst || entries.length <= 20) chosen.add(entry.id);
    }
    runs.get(entry.id).listed = entry;
  }
  if (isFirst) [...chosen].slice(20).forEach((id) => chosen.delete(id));
  if (!runs.has(focus)) focus = (entries.find((entry) => entry.state === "running" && chosen.has(entry.id)) ?? runs.get([...chosen].at(-1)))?.id ?? null;
}

/** Takes in an answer. Returns whether something has changed that is drawn. */
function receive(answer) {
  list(answer.runs);
  leftOut = answer.left_out;
  return Object.entries(answer.told).map(([id, told]) => runs.get(id)?.receive(told)).some(Boolean);
}

/** Most runs and most characters of a question. Servers refuse addresses of more than 65,536 characters. */
const [MOST_RUNS, MOST_CHARACTERS] = [100, 30_000];

/** Addresses that ask together for what is new in the chosen runs. */
function questions() {
  const found = [[]];
  let length = 0;
  for (const run of visible()) {
    const asked = `run=${run.id}&at=${encodeURIComponent(run.cursor)}`;
    length += asked.length;
    if (found.at(-1).length === MOST_RUNS || length > MOST_CHARACTERS) {
      found.push([]);
      length = asked.length;
    }
    found.at(-1).push(asked);
  }
  return found.map((asked) => `poll?${asked.join("&")}`);
}
