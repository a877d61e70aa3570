// The part of the runs that all charts show, and how mouse, touch and keys move it.
"use strict";

/** Part of the horizontal axis, or null for the whole runs. `cursor` is a place on it, or null. */
const view = { part: null, cursor: null, over: null };
let charts = [];
let isDue = false;

/** First and last place of all chosen runs. */
function extent() {
  let [low, high] = [Infinity, -Infinity];
  for (const run of visible()) {
    for (const name of ["loss", "validation_loss", ...run.series.keys()]) {
      if (!run.series.has(name)) continue;
      const xs = run.along(name, axes.along);
      const first = axes.logx ? lowerBound(xs, Number.MIN_VALUE) : 0;
      if (first < xs.length) [low, high] = [Math.min(low, xs[first]), Math.max(high, xs[xs.length - 1])];
      if (name !== "loss" && name !== "validation_loss") break;
    }
  }
  if (!(low <= high)) return [axes.logx ? 1 : 0, 10];
  return low === high ? (axes.logx ? [low / 2, high * 2] : [low - 0.5, high + 0.5]) : [low, high];
}

const shownPart = () => view.part ?? extent();
const scaleOf = () => (axes.logx ? LOG : LINEAR);

/** Shows another part. Parts that hold the whole runs follow a run that grows. */
function showPart(low, high) {
  const [least, most] = extent();
  const scale = scaleOf();
  const [from, to, first, last] = [low, high, least, most].map(scale.to);
  const length = Math.min(Math.max(to - from, (last - first) * 1e-6), last - first);
  const start = Math.min(Math.max(from, first), last - length);
  view.part = length >= (last - first) * 0.999 ? null : [scale.from(start), scale.from(start + length)];
  redraw();
}

/** Zooms about a place, which stays where it is. */
function zoom(factor, about = null) {
  const scale = scaleOf();
  const [low, high] = shownPart().map(scale.to);
  const centre = about === null ? (low + high) / 2 : scale.to(about);
  showPart(scale.from(centre - (centre - low) * factor), scale.from(centre + (high - centre) * factor));
}

/** Moves by a share of the shown part. */
function pan(share) {
  const scale = scaleOf();
  const [low, high] = shownPart().map(scale.to);
  showPart(scale.from(low + share * (high - low)), scale.from(high + share * (high - low)));
}

/** Draws all charts that can be seen, once before the next frame. Others are drawn when they come into sight. */
function redraw() {
  for (const chart of charts) chart.isStale = true;
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const [low, high] = shownPart();
    for (const chart of charts) if (chart.isSeen && chart.isStale) chart.draw(low, high);
    document.querySelector("[data-zoom=reset]").disabled = view.part === null;
    if (view.cursor !== null) point(view.cursor);
  });
}

const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((one) => one.place === entry.target);
    if (chart) chart.isSeen = entry.isIntersecting;
  }
  if (charts.some((chart) => chart.isSeen && chart.isStale)) redraw();
}, { rootMargin: "60px" });

/** Shows the figures at a place in all charts, or the last ones. */
function point(x) {
  view.cursor = x;
  for (const chart of charts) {
    if (!chart.plot) continue;
    const left = x === null ? -10 : chart.plot.valToPos(x, "x");
    chart.plot.setCursor({ left: left >= 0 && left <= chart.plot.over.clientWidth ? left : -10, top: x === null ? -10 : 0 }, false);
    if (chart.isSeen || x === null) chart.read(x);
  }
  showTip(x);
}

const tip = make("div.tip", { hidden: true, "aria-hidden": "true" });

/** Figures of all runs beside the cursor, if there are several runs or a mark is near. */
function showTip(x) {
  const chart = view.over;
  const lines = x === null || !chart ? [] : [...tipOfMarks(chart, x), ...tipOfRuns(chart, x)];
  tip.hidden = !lines.length;
  if (tip.hidden) return;
  tip.replaceChildren(...lines);
  if (tip.parentNode !== chart.place) chart.place.append(tip);
  const left = chart.plot.valToPos(x, "x") + chart.plot.bbox.left / devicePixelRatio;
  const isRight = left > chart.width / 2;
  tip.style.left = isRight ? "" : `${left + 14}px`;
  tip.style.right = isRight ? `${chart.width - left + 14}px` : "";
}

function tipOfRuns(chart, x) {
  if (chart.shown.length < 2) return [];
  const name = chart.kind.names[0];
  const isThere = (run) => {
    const xs = run.along(chart.kind.names.find((one) => run.series.has(one)), axes.along);
    return x >= xs[0] && x <= xs[xs.length - 1];
  };
  const found = chart.shown.filter(isThere).map((run) => ({ run, value: chart.valueAt(run, name, x) })).filter(({ value }) => Number.isFinite(value));
  found.sort((a, b) => b.value - a.value);
  const rows = found.slice(0, 12).map(({ run, value }) => make(run.id === focus ? "div.focus" : "div",
    make("i", { "--run": run.color }), make("span.name", run.name), make("span.number", chart.told(value))));
  return [...rows, found.length > 12 && make("div.soft", `and ${found.length - 12} more`)].filter(Boolean);
}

function tipOfMarks(chart, x) {
  const run = focused();
  const place = chart.plot.valToPos(x, "x");
  return (run?.parts.marks ?? [])
    .filter((mark) => Math.abs(chart.plot.valToPos(run.place(mark.step, axes.along), "x") - place) < 6)
    .slice(0, 4).map((mark) => make("div.mark", `${MARKS[mark.kind]?.[0] ?? mark.kind} at step ${whole.format(mark.step)}${mark.text && `: ${mark.text}`}`));
}

/** Binds mouse, touch and keys to a chart. */
function bindPointer(chart) {
  const { over } = chart.plot;
  const placeAt = (clientX) => {
    const box = over.getBoundingClientRect();
    return chart.plot.posToVal(Math.min(Math.max(clientX - box.left, 0), box.width), "x");
  };
  const fingers = new Map();
  let drag = null;
  const begin = (event) => {
    over.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event.clientX);
    drag = { from: event.clientX, isPan: event.pointerType === "touch" || event.shiftKey || event.button === 1, moved: false };
    if (event.button === 1) event.preventDefault();
  };
  const move = (event) => {
    view.over = chart;
    if (fingers.size === 2 && fingers.has(event.pointerId)) pinch(event);
    else if (drag?.isPan && fingers.has(event.pointerId)) {
      pan((fingers.get(event.pointerId) - event.clientX) / over.clientWidth);
      drag.moved = true;
    } else if (drag) select(over, chart, drag.from, event.clientX);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.clientX);
    point(placeAt(event.clientX));
  };
  const pinch = (event) => {
    const before = [...fingers.values()];
    const after = [...fingers].map(([id, x]) => (id === event.pointerId ? event.clientX : x));
    const gap = ([a, b]) => Math.max(Math.abs(a - b), 20);
    zoom(gap(before) / gap(after), placeAt((after[0] + after[1]) / 2));
    drag.moved = true;
  };
  const end = (event) => {
    fingers.delete(event.pointerId);
    chart.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (drag && !drag.isPan && event.type === "pointerup" && Math.abs(event.clientX - drag.from) > 5) {
      const [a, b] = [placeAt(drag.from), placeAt(event.clientX)];
      showPart(Math.min(a, b), Math.max(a, b));
    }
    if (!fingers.size) drag = null;
  };
  over.addEventListener("pointerdown", begin);
  over.addEventListener("pointermove", move);
  over.addEventListener("pointerup", end);
  over.addEventListener("pointercancel", end);
  over.addEventListener("pointerleave", () => { if (!drag) { view.over = null; point(null); } });
  over.addEventListener("dblclick", () => { view.part = null; redraw(); });
  over.addEventListener("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !event.metaKey && !(isSideways && view.part)) return;
    event.preventDefault();
    if (isSideways) pan((event.deltaX || event.deltaY) / over.clientWidth);
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), placeAt(event.clientX));
  }, { passive: false });
}

function select(over, chart, from, to) {
  const box = over.getBoundingClientRect();
  const [a, b] = [from, to].map((x) => Math.min(Math.max(x - box.left, 0), box.width)).sort((x, y) => x - y);
  chart.plot.setSelect({ left: a, width: b - a, top: 0, height: box.height }, false);
}

/** Keys of a chart that has the focus. */
function onKey(chart, event) {
  const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const act = { "+": () => zoom(0.7, view.cursor), "=": () => zoom(0.7, view.cursor), "-": () => zoom(1 / 0.7, view.cursor),
    0: () => showPart(...extent()), Escape: () => { point(null); showPart(...extent()); }, Home: () => speak(chart, shownPart()[0]), End: () => speak(chart, shownPart()[1]) };
  if (event.ctrlKey || event.metaKey || event.altKey || !(side || act[event.key])) return;
  event.preventDefault();
  if (!side) act[event.key]();
  else if (event.shiftKey) pan(side * 0.2);
  else step(chart, side);
}

/** Moves the cursor by a figure, or by a pixel where figures are closer. */
function step(chart, side) {
  const run = chart.shown.includes(focused()) ? focused() : chart.shown[0];
  if (!run) return;
  const xs = run.along(chart.kind.names.find((name) => run.series.has(name)), axes.along);
  const [low, high] = shownPart();
  const from = view.cursor ?? (side > 0 ? low : high);
  const { plot } = chart;
  const pixel = plot.posToVal(plot.valToPos(from, "x") + side, "x");
  const i = side > 0 ? lowerBound(xs, Math.max(pixel, from + 1e-9)) : lowerBound(xs, Math.min(pixel, from)) - (xs[lowerBound(xs, pixel)] === pixel ? 0 : 1);
  speak(chart, Math.min(Math.max(xs[Math.min(Math.max(i, 0), xs.length - 1)], low), high));
}

function speak(chart, x) {
  view.over = chart;
  point(x);
  say(at("spoken"), `${chart.kind.title}: ${chart.readout.textContent}`);
}
