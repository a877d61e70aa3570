// The charts of a run: which figures they show, their words and units.
"use strict";

const number = (value) => digits(value);
const rate = (value) => (Math.abs(value) >= 1e5 ? short(value, 4) : digits(value));

/** Each chart: names of figures (the first is the line that is smoothed, the second is drawn with points), and words. */
const KINDS = [
  { names: ["loss", "validation_loss"], title: "Loss", unit: "nats per token; points: validation", wide: true, isLog: true },
  { names: ["gradient_norm"], title: "Gradient norm", unit: "before clipping", isLog: true },
  { names: ["learning_rate"], title: "Learning rate", unit: "", isLog: true, isExact: true },
  { names: ["tokens_per_second"], title: "Tokens per second", unit: "all ranks", told: rate, isNoisy: true, isFromZero: true },
  { names: ["utilisation"], title: "Share of the peak", unit: "", told: percent, isNoisy: true, isFromZero: true },
  { names: ["seconds"], title: "Time of a step", unit: "", told: duration, isNoisy: true, isFromZero: true, isLog: true },
  { names: ["balance"], title: "Balance of the experts", unit: "1 is even" },
  { names: ["largest_load"], title: "Largest load of an expert", unit: "multiples of the mean" },
  { names: ["router_entropy"], title: "Entropy of the routers", unit: "nats" },
  { names: ["router_z"], title: "Loss of the routers' logits", unit: "", isLog: true },
  { names: ["validation_bits_per_byte"], title: "Bits per byte", unit: "validation", isExact: true, hasPoints: true },
  { names: ["loss_scale"], title: "Scale of the loss", unit: "", isExact: true, isLog: true },
];

/** Figures without a chart of their own: other charts say the same, or they count something. */
const WITHOUT_CHART = /^(step|samples|elapsed_seconds|skipped|model_flops_per_second|validation_perplexity|idle_.*|hang_.*)$/;

const KNOWN = new Set(KINDS.flatMap((kind) => kind.names));

/** Charts for the runs that are shown. Figures that this page does not know, such as scores, get charts of their own. */
function kindsOf(shown) {
  const names = new Set(shown.flatMap((run) => [...run.series.keys()]));
  const known = KINDS.filter((kind) => kind.names.some((name) => names.has(name) && isFigure(shown, name)));
  const others = [...names].filter((name) => !KNOWN.has(name) && !WITHOUT_CHART.test(name) && isFigure(shown, name)).sort();
  return [...known, ...others.map((name) => ({
    names: [name], title: name.replace(/_/g, " "), unit: "", isExact: true, hasPoints: !name.startsWith("learning_rate"),
  }))];
}

/** Whether any run has a finite figure of this name. */
const isFigure = (shown, name) => shown.some((run) => run.series.get(name)?.values.view().some(Number.isFinite));

/** Times of an axis, all in the unit that suits the largest: 0, 30 s, 60 s; 0, 1.5 h, 3 h. */
function timeTicks(ticks) {
  const most = Math.max(...ticks);
  const [size, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => most >= 3 * one) ?? [0.001, "ms"];
  return ticks.map((tick) => (tick === 0 ? "0" : `${Number((tick / size).toPrecision(3))}${THIN}${name}`));
}

const ALONG = {
  step: { title: "steps", told: (value) => `step ${whole.format(value)}`, ticks: (ticks) => ticks.map((value) => (value >= 1e4 ? short(value, 4) : whole.format(value))) },
  tokens: { title: "tokens", told: (value) => `${short(value)} tokens`, ticks: (ticks) => ticks.map((value) => short(value, 4)) },
  seconds: { title: "time of the steps", told: duration, ticks: timeTicks },
};

/** Distances between ticks of a time axis, in seconds. */
const TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** Ticks of a logarithmic axis between two figures: round numbers, as many as there is room for. */
function logTicks(low, high, most) {
  if (!(low > 0 && high < Infinity)) return [];
  for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of digits) {
        const value = Number(`${digit}e${power}`);
        if (value >= low && value <= high) found.push(value);
      }
    }
    if (found.length <= most && found.length >= 2) return found;
    if (found.length > most && digits.length === 1) return found.filter((_, i) => i % Math.ceil(found.length / most) === 0);
    if (found.length < 2) return linearTicks(low, high, most);
  }
  return [];
}

function linearTicks(low, high, most, steps = null) {
  const wanted = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = steps?.find((one) => one >= wanted) ?? [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= wanted * 0.999);
  if (!(step > 0) || !Number.isFinite(step)) return [];
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
