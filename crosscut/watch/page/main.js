// Assembly of the page, and the question that is asked every second.
"use strict";

const SMOOTHINGS = ["auto", 0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999];
const controls = at("controls");
const shared = controls.elements;
let drawn = "";

/** Reads the controls. The page keeps them when it is loaded again. */
function readControls() {
  axes.along = shared.along.value;
  axes.logx = shared.logx.checked;
  axes.logy = shared.logy.checked;
  axes.weight = SMOOTHINGS[Number(shared.smoothing.value)];
  say(controls.querySelector("output"), axes.weight ? String(axes.weight) : "off");
  shared.smoothing.setAttribute("aria-valuetext", typeof axes.weight === "string" || !axes.weight ? axes.weight || "off" : `weight of the past ${axes.weight}`);
}

/** Makes the charts anew if they show other runs, figures or axes than before, and draws them. */
function drawCharts() {
  const shown = visible().filter((run) => run.series.size);
  at("none").hidden = shown.length > 0;
  controls.hidden = !shown.length;
  const kinds = kindsOf(shown);
  const wanted = JSON.stringify([kinds.map((kind) => kind.names), shown.map((run) => [run.id, ...run.series.keys()]), focus, axes]);
  if (wanted !== drawn) {
    drawn = wanted;
    rebuild(kinds, shown);
  }
  for (const chart of charts) chart.describe();
  redraw();
}

function rebuild(kinds, shown) {
  readColors();
  const known = new Map(charts.map((chart) => [chart.kind.names[0], chart]));
  charts = kinds.map((kind) => known.get(kind.names[0]) ?? makeChart(kind));
  const figures = charts.map((chart) => chart.figure);
  const place = at("charts");
  if (figures.some((figure, i) => figure !== place.children[i]) || figures.length !== place.children.length) place.replaceChildren(...figures);
  for (const chart of charts) chart.build(shown);
}

function makeChart(kind) {
  const chart = new Chart(kind);
  chart.place.addEventListener("keydown", (event) => onKey(chart, event));
  sight.observe(chart.place);
  return chart;
}

function drawAll() {
  drawList(drawAll);
  drawCharts();
  drawFacts();
  point(view.cursor);
  for (const section of sections) section.draw();
}

/** Draws everything anew, because the colours or the width have changed. */
function renew() {
  drawn = "";
  for (const section of sections) section.seen = section.drawn = undefined;
  drawAll();
}

/** Whether something has come that is not drawn yet. */
let isNew = false;

/** Asks for what is new in the chosen runs, in several questions, of which any may fail. */
async function ask() {
  const before = runs.size;
  for (const question of questions()) isNew = receive(await (await fetch(question)).json()) || isNew;
  isNew ||= runs.size !== before;
}

/** Asks for what is new, every second while the page can be seen. */
async function follow() {
  let isLost = false;
  for (;;) {
    if (!document.hidden) {
      try {
        await ask();
        if (isNew) {
          isNew = false;
          drawAll();
        } else {
          drawList(drawAll);
          drawFacts();
        }
        isLost = false;
      } catch (error) {
        if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
        isLost = true;
      }
      say(at("link"), isLost ? "crosscut watch has ended; these are the last figures" : "");
    }
    const isWanted = (run) => chosen.has(run.id) && !run.cursor && run.listed.state !== "gone";
    if (document.hidden || isLost || ![...runs.values()].some(isWanted)) {
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function start() {
  at("details").replaceChildren(...sections.map((section) => section.element));
  readControls();
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", (event) => {
    const before = { along: axes.along, logx: axes.logx };
    readControls();
    if (before.along !== axes.along || before.logx !== axes.logx) view.part = null;
    drawAll();
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => ({ in: () => zoom(0.5), out: () => zoom(2), reset: () => { view.part = null; redraw(); } })[button.dataset.zoom]());
  }
  at("all").addEventListener("click", () => { for (const id of runs.keys()) chosen.add(id); drawAll(); });
  at("one").addEventListener("click", () => { chosen.clear(); chosen.add(focus); drawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; renew(); } });
  say(at("link"), "reading the runs");
  const frozen = JSON.parse(at("frozen").textContent || "null");
  if (!frozen) return follow();
  receive(frozen);
  say(at("link"), frozen.words);
  return drawAll();
}

start();
