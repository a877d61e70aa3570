"use strict";

// The page looks figures up and draws them; it computes none. `grid` holds one row for each setting of the controls.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const color = (index) => `var(--c${index % 8})`;
const gigabytes = (megabytes) => (megabytes / 1000).toFixed(megabytes < 10000 ? 2 : 1);
const digits = (number) => (number < 100 ? number.toPrecision(3) : Math.round(number).toLocaleString("en"));
const seconds = (milliseconds) => (milliseconds < 1000 ? `${milliseconds.toFixed(1)} ms` : `${digits(milliseconds / 1000)} s`);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function legend(id, names) {
  at(id).replaceChildren(...names.map((name, index) => {
    const entry = document.createElement("span");
    const mark = document.createElement("i");
    mark.style.background = color(index);
    entry.append(mark, name);
    return entry;
  }));
}

function row(choice) {
  return data.grid[[choice.model, choice.tensor, choice.micro, choice.recompute, choice.sharding].join(" ")];
}

function choice() {
  return {
    model: Number(at("model").value),
    tensor: Number(at("tensor").value),
    micro: Number(at("micro").value),
    recompute: at("recompute").value,
    sharding: at("sharding").value,
  };
}

// A drawing is as wide as its place on the page, so that its words have the size of other words.
function widthOf(svg) {
  const { paddingLeft, paddingRight } = getComputedStyle(svg.parentElement);
  return Math.max(240, Math.floor(svg.parentElement.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)));
}

// Draws horizontal stacked bars, with a label before each bar and words after it; on a narrow page, both stand above the
// bar. A line across all bars marks the limit.
function bars(svg, rows, limit = 0) {
  const width = widthOf(svg);
  const narrow = width < 520;
  const [left, right, height, above] = narrow ? [0, 4, 44, 18] : [92, 200, 34, 0];
  const most = Math.max(limit, ...rows.map((entry) => sum(entry.parts))) || 1;
  const x = (value) => left + (value / most) * (width - left - right);
  svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * height + (limit ? 22 : 4)}`);
  svg.setAttribute("aria-label", rows.map((entry) => `${entry.label}: ${entry.words}`).join("; "));
  const words = [];  // over the bars and the limit's line
  const drawn = rows.flatMap((entry, index) => {
    const y = index * height + 6 + above;
    let before = 0;
    const parts = entry.parts.map((part, kind) => {
      const bar = element("rect", {
        x: x(before), y, width: Math.max(0, x(before + part) - x(before)), height: height - 12 - above, fill: color(kind),
      });
      before += part;
      return bar;
    });
    const base = narrow ? y - 5 : y + 15;
    const place = narrow ? { x: width, "text-anchor": "end" } : { x: x(before) + 8 };
    words.push(element("text", { x: 0, y: base, class: entry.chosen ? "value" : "" }, entry.label));
    words.push(element("text", { ...place, y: base, class: entry.over ? "over" : "value" }, entry.words));
    return parts;
  });
  if (limit) {
    drawn.push(element("line", { x1: x(limit), x2: x(limit), y1: 0, y2: rows.length * height, class: "limit" }));
    const attributes = { x: Math.min(x(limit), width - 26), y: rows.length * height + 15, "text-anchor": "middle" };
    words.push(element("text", attributes, `${gigabytes(limit)} GB`));
  }
  svg.replaceChildren(...drawn, ...words);
  for (const text of limit && !narrow ? words.slice(0, -1) : []) {
    const { x: start, width: length } = text.getBBox();  // words that the limit's line would cross stand behind it
    if (start > left && start < x(limit) && start + length > x(limit) - 4) text.setAttribute("x", x(limit) + 8);
  }
}

function possible(chosen) {
  return data.tensors.map((tensor, index) => ({ tensor, index, found: row({ ...chosen, tensor: index }) }))
    .filter((entry) => entry.found);
}

// The smallest number of tensor ranks with which a model fits, whatever the other controls; undefined if there is none.
function fewest(model) {
  const cells = Object.entries(data.grid).filter(([, found]) => sum(found.memory) <= data.limit).map(([key]) => key.split(" "));
  const tensors = cells.filter(([of]) => Number(of) === model).map(([, tensor]) => data.tensors[tensor]);
  if (model === data.first.model) tensors.push(...data.points.map((point) => point.tensor));
  return tensors.sort((a, b) => a - b)[0];
}

// The choice that the reader keeps to compare others with it, as an entry of the bars.
let keeping;

function kept(entry) {
  return keeping ? [{ label: "kept", chosen: true, ...entry(row(keeping)) }] : [];
}

function keep() {
  keeping = keeping || !row(choice()) ? undefined : choice();
  at("keep").textContent = keeping ? "Forget the kept choice" : "Keep this choice to compare";
  at("kept-words").textContent = keeping
    ? `Kept: ${data.models[keeping.model].name}, tensor ${data.tensors[keeping.tensor]}, micro-batch ` +
      `${data.micros[keeping.micro]}, recompute ${wordsOf("recompute")}, ${wordsOf("sharding")}. ${row(keeping).budget}`
    : "";
  draw();
}

const wordsOf = (id) => at(id).selectedOptions[0].textContent;

function drawWall(chosen, layouts) {
  const fits = ({ found }) => sum(found.memory) <= data.limit;
  const rows = layouts.map((layout) => ({
    label: `tensor ${layout.tensor}`,
    parts: layout.found.memory,
    chosen: layout.index === chosen.tensor,
    over: !fits(layout),
    words: `${gigabytes(sum(layout.found.memory))} GB${fits(layout) ? "" : ", does not fit"}`,
  }));
  bars(at("wall"), [...rows, ...kept((found) => ({
    parts: found.memory, over: sum(found.memory) > data.limit, words: `${gigabytes(sum(found.memory))} GB`,
  }))], data.limit);
  const least = layouts[0];
  const most = layouts.find(fits);
  const any = fewest(chosen.model);
  at("wall-words").textContent =
    `${data.models[chosen.model].words} needs ${gigabytes(sum(least.found.memory))} GB per rank ` +
    `${least.tensor === 1 ? "without tensor parallelism" : `with tensor ${least.tensor}`}. ` +
    `Fewest tensor ranks with which the model fits: ${most?.tensor ?? "none"} with these settings` +
    (any < (most?.tensor ?? Infinity) ? `, ${any} with other settings.` : ".");
}

function drawTime(chosen, layouts) {
  const rows = layouts.map(({ tensor, index, found }) => ({
    label: `tensor ${tensor}`,
    parts: found.time,
    chosen: index === chosen.tensor,
    words: `${seconds(sum(found.time))}, ${found.utilisation.toFixed(1)}%`,
  }));
  bars(at("time"), [...rows, ...kept((found) => ({
    parts: found.time, words: `${seconds(sum(found.time))}, ${found.utilisation.toFixed(1)}%`,
  }))]);
  const found = row(chosen);
  const waits = found.time[data.times.indexOf("exposed")];
  at("time-words").textContent =
    `With tensor ${data.tensors[chosen.tensor]}, a step takes ${seconds(sum(found.time))}. The step waits ` +
    `${seconds(waits)} for messages. Utilisation is ${found.utilisation.toFixed(1)}% of the peak.` +
    (found.budget && ` ${found.budget}.`);
}

function drawNothing(chosen) {
  for (const id of ["wall", "time"]) at(id).replaceChildren();
  at("wall-words").textContent =
    `${data.models[chosen.model].words} has no layout with a micro-batch of ${data.micros[chosen.micro]} on these ranks.`;
  at("time-words").textContent = "";
}

function drawPlan() {
  const [height, left, bottom] = [300, 48, 34];
  const { points, limit } = data;
  at("plan-section").hidden = !points.length;
  if (!points.length) return;
  const slowest = Math.max(...points.map((point) => point.seconds));
  const fastest = Math.min(...points.map((point) => point.seconds));
  const x = (seconds) => left + (Math.log(seconds / fastest) / (Math.log(slowest / fastest) || 1)) * (width - left - 12);
  const y = (megabytes) => 8 + (1 - megabytes / limit) * (height - bottom - 8);
  const tensors = [...new Set(points.map((point) => point.tensor))].sort((a, b) => a - b);
  const svg = at("plan");
  const width = widthOf(svg);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const tell = (point) => { at("plan-words").textContent = `${point.label}: ${point.words}.`; };
  const frame = [
    element("line", { x1: left, x2: width, y1: y(0), y2: y(0), class: "line" }),
    element("line", { x1: left, x2: width, y1: y(limit), y2: y(limit), class: "limit" }),
    element("text", { x: 0, y: y(limit) + 4 }, `${gigabytes(limit)}`),
    element("text", { x: 0, y: y(0) + 4 }, "0 GB"),
    element("text", { x: left, y: height - 6 }, `${seconds(fastest * 1000)} a step`),
    element("text", { x: width, y: height - 6, "text-anchor": "end" }, seconds(slowest * 1000)),
  ];
  const circles = points.map((point, index) => {
    const circle = element("circle", {
      cx: x(point.seconds), cy: y(point.megabytes), r: 5, fill: color(tensors.indexOf(point.tensor)),
      class: index ? "" : "chosen", tabindex: index < 20 ? 0 : -1, role: "img",
      "aria-label": `${point.label}: ${point.words}`,
    });
    circle.append(element("title", {}, `${point.label}: ${point.words}`));
    for (const event of ["pointerenter", "focus"]) circle.addEventListener(event, () => tell(point));
    return circle;
  });
  svg.replaceChildren(...frame, ...circles.reverse());
  legend("plan-legend", tensors.map((tensor) => `tensor ${tensor}`));
  tell(points[0]);
}

// Draws the layouts that the controls allow. If there is none with the chosen number of tensor ranks, the nearest smaller
// number is chosen, or else the smallest one.
function draw() {
  const chosen = choice();
  const layouts = possible(chosen);
  at("model-value").textContent = data.models[chosen.model].name;
  at("micro-value").textContent = data.micros[chosen.micro];
  if (layouts.length) {
    chosen.tensor = (layouts.findLast((layout) => layout.index <= chosen.tensor) ?? layouts[0]).index;
    at("tensor").value = chosen.tensor;
    drawWall(chosen, layouts);
    drawTime(chosen, layouts);
  } else {
    drawNothing(chosen);
  }
  at("tensor-value").textContent = data.tensors[chosen.tensor];
}

at("title").textContent = data.title;
at("conditions").textContent = data.conditions;
for (const [id, values] of [["model", data.models], ["tensor", data.tensors], ["micro", data.micros]]) {
  at(id).max = values.length - 1;
  at(id).value = data.first[id];
  at(id).addEventListener("input", draw);
}
for (const id of ["recompute", "sharding"]) {
  at(id).replaceChildren(...data[id].map(([value, words]) => new Option(words, value)));
  at(id).value = data.first[id];
  at(id).addEventListener("input", draw);
}
legend("wall-legend", data.memories.map((name) => name.replaceAll("_", " ")));
legend("time-legend", data.times.map((name) => ({ exposed: "waiting for messages", passes: "reading and writing" })[name] ?? name));
at("keep").addEventListener("click", keep);
const drawAll = () => { drawnWidth = innerWidth; draw(); drawPlan(); };
let drawnWidth;
addEventListener("resize", () => { if (innerWidth !== drawnWidth) drawAll(); });
drawAll();
