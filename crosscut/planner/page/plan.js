"use strict";

// The page looks figures up and draws them; it computes none. `grid` holds one row for each setting of the controls.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const color = (index) => `var(--c${index % 8})`;
const gigabytes = (megabytes) => (megabytes / 1000).toFixed(megabytes < 10000 ? 2 : 1);
const same = (values) => values.every((value) => value === values[0]);
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

// Draws horizontal stacked bars, with a label before each bar and words after it. A line marks the limit of a row. If
// all rows have the same limit, its value stands below the last row.
function bars(svg, rows) {
  const [width, left, right, height] = [720, 92, 200, 34];
  const most = Math.max(...rows.map((entry) => Math.max(entry.limit ?? 0, sum(entry.parts)))) || 1;
  const limit = same(rows.map((entry) => entry.limit)) ? rows[0].limit : undefined;
  const x = (value) => left + (value / most) * (width - left - right);
  svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * height + (limit ? 22 : 4)}`);
  const words = [];  // over the bars and the limit's line
  const drawn = rows.flatMap((entry, index) => {
    const y = index * height + 6;
    let before = 0;
    const parts = entry.parts.map((part, kind) => {
      const bar = element("rect", {
        x: x(before), y, width: Math.max(0, x(before + part) - x(before)), height: height - 12, fill: color(kind),
      });
      before += part;
      return bar;
    });
    words.push(element("text", { x: 0, y: y + 15, class: entry.chosen ? "value" : "" }, entry.label));
    words.push(element("text", { x: x(before) + 8, y: y + 15, class: entry.over ? "over" : "value" }, entry.words));
    return parts;
  });
  rows.forEach((entry, index) => {
    if (!entry.limit) return;
    const place = x(entry.limit);
    drawn.push(element("line", { x1: place, x2: place, y1: index * height, y2: (index + 1) * height, class: "limit" }));
  });
  if (limit) {
    const attributes = { x: x(limit), y: rows.length * height + 15, "text-anchor": "middle" };
    words.push(element("text", attributes, `${gigabytes(limit)} GB`));
  }
  svg.replaceChildren(...drawn, ...words);
}

function possible(chosen) {
  return data.tensors.map((tensor, index) => ({ tensor, index, found: row({ ...chosen, tensor: index }) }))
    .filter((entry) => entry.found);
}

function drawWall(chosen) {
  const holds = ({ index, found }) => sum(found.memory) <= data.limits[index];
  const of = (index) => (same(data.limits) ? "" : ` of ${gigabytes(data.limits[index])}`);
  const rows = possible(chosen).map(({ tensor, index, found }) => ({
    label: tensor === 1 ? "one GPU" : `tensor ${tensor}`,
    parts: found.memory,
    limit: data.limits[index],
    chosen: index === chosen.tensor,
    over: !holds({ index, found }),
    words: `${gigabytes(sum(found.memory))} GB${of(index)}${holds({ index, found }) ? "" : ", does not fit"}`,
  }));
  bars(at("wall"), rows);
  const fits = possible(chosen).find(holds);
  const one = row({ ...chosen, tensor: 0 });
  at("wall-words").textContent =
    `${data.models[chosen.model].words} needs ${gigabytes(sum(one.memory))} GB per GPU without tensor parallelism` +
    `${chosen.sharding === "none" ? "" : ", even though the data ranks shard it"}. ` +
    (fits ? `The smallest number of tensor ranks with which the model fits is ${fits.tensor}.` : "The model fits with none of these layouts.");
}

function drawTime(chosen) {
  const rows = possible(chosen).map(({ tensor, index, found }) => ({
    label: tensor === 1 ? "one GPU" : `tensor ${tensor}`,
    parts: found.time,
    chosen: index === chosen.tensor,
    words: `${sum(found.time).toFixed(1)} ms, ${found.utilisation.toFixed(1)}%`,
  }));
  bars(at("time"), rows);
  const found = row(chosen) ?? row({ ...chosen, tensor: 0 });
  const waits = found.time[data.times.indexOf("exposed")];
  at("time-words").textContent =
    `With tensor ${data.tensors[chosen.tensor]}, a step takes ${sum(found.time).toFixed(1)} ms. The step waits ` +
    `${waits.toFixed(1)} ms for messages. Utilisation is ${found.utilisation.toFixed(1)}% of the peak.`;
}

function drawPlan() {
  const [width, height, left, bottom] = [720, 300, 48, 34];
  const { points, limit } = data.plan;
  at("plan-section").hidden = !points.length;
  if (!points.length) return;
  const slowest = Math.max(...points.map((point) => point.seconds));
  const fastest = Math.min(...points.map((point) => point.seconds));
  const x = (seconds) => left + (Math.log(seconds / fastest) / (Math.log(slowest / fastest) || 1)) * (width - left - 12);
  const y = (megabytes) => 8 + (1 - megabytes / limit) * (height - bottom - 8);
  const tensors = [...new Set(points.map((point) => point.tensor))].sort((a, b) => a - b);
  const svg = at("plan");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const tell = (point) => { at("plan-words").textContent = `${point.label}: ${point.words}.`; };
  const frame = [
    element("line", { x1: left, x2: width, y1: y(0), y2: y(0), class: "line" }),
    element("line", { x1: left, x2: width, y1: y(limit), y2: y(limit), class: "limit" }),
    element("text", { x: 0, y: y(limit) + 4 }, `${gigabytes(limit)}`),
    element("text", { x: 0, y: y(0) + 4 }, "0 GB"),
    element("text", { x: left, y: height - 6 }, `${fastest.toPrecision(3)} s a step`),
    element("text", { x: width, y: height - 6, "text-anchor": "end" }, `${slowest.toPrecision(3)} s`),
  ];
  const circles = points.map((point, index) => {
    const circle = element("circle", {
      cx: x(point.seconds), cy: y(point.megabytes), r: 5, fill: color(tensors.indexOf(point.tensor)),
      class: index ? "" : "chosen", tabindex: index < 20 ? 0 : -1,
    });
    circle.append(element("title", {}, `${point.label}: ${point.words}`));
    for (const event of ["pointerenter", "focus"]) circle.addEventListener(event, () => tell(point));
    return circle;
  });
  svg.replaceChildren(...frame, ...circles.reverse());
  legend("plan-legend", tensors.map((tensor) => `tensor ${tensor}`));
  tell(points[0]);
}

function draw() {
  const chosen = choice();
  while (!row(chosen)) chosen.tensor -= 1;
  at("tensor").value = chosen.tensor;
  at("model-value").textContent = data.models[chosen.model].name;
  at("tensor-value").textContent = data.tensors[chosen.tensor];
  at("micro-value").textContent = data.micros[chosen.micro];
  drawWall(chosen);
  drawTime(chosen);
}

at("device").textContent = data.device;
at("conditions").textContent = data.conditions;
for (const [id, values, first] of [["model", data.models, data.first], ["tensor", data.tensors, 0], ["micro", data.micros, 0]]) {
  at(id).max = values.length - 1;
  at(id).value = first;
  at(id).addEventListener("input", draw);
}
for (const id of ["recompute", "sharding"]) {
  at(id).replaceChildren(...data[id].map(([value, words]) => new Option(words, value)));
  at(id).addEventListener("input", draw);
}
legend("wall-legend", data.memories.map((name) => name.replaceAll("_", " ")));
legend("time-legend", data.times.map((name) => ({ exposed: "waiting for messages", passes: "reading and writing" })[name] ?? name));
draw();
drawPlan();
