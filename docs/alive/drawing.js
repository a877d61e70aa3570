// Parts that several figures share: drawings, choices and numbers.
"use strict";

const data = JSON.parse(at("data").textContent);
const color = (index) => `var(--c${index % 8})`;
const minus = (text) => String(text).replaceAll("-", "\u2212");
const subscript = (rank) => "₁₂"[rank];

function draw(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A drawing is as wide as its place on the page, so that its words have the size of other words.
function widthOf(element) {
  const { paddingLeft, paddingRight } = getComputedStyle(element.parentElement);
  return Math.floor(element.parentElement.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
}

function legend(id, names) {
  at(id).replaceChildren(...names.map(([name, fill]) => make("span", make("i", { "--fill": fill }), name)));
}

/** Radio buttons in a row. Calls `chosen` with the index. */
function choices(fieldset, name, labels, first, chosen) {
  fieldset.replaceChildren(...labels.map((label, index) => make("label",
    make("input", { type: "radio", name, value: index, checked: index === first, change: () => chosen(index) }),
    make("span", label))));
}

/** Horizontal bars of stacked parts, with a label before each bar and words after it; on a narrow page, above it. A line
 *  at `limit` crosses the bars. */
function bars(svg, rows, { scale = (value) => value, most, limit = 0, limitWords = "" }) {
  const width = widthOf(svg);
  const narrow = width < 560;
  const [left, right, height, above] = narrow ? [0, 4, 46, 18] : [170, 210, 36, 0];
  const x = (value) => left + (scale(value) / scale(most)) * (width - left - right);
  svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * height + (limit ? 22 : 4)}`);
  svg.setAttribute("aria-label", rows.map((row) => `${row.label}: ${row.words}`).join("; "));
  const drawn = [], words = [];
  rows.forEach((row, index) => {
    const y = index * height + 6 + above;
    let before = 0;
    row.parts.forEach((part, kind) => {
      const end = x(before + part);
      const fill = color(row.color ?? kind);
      if (part) drawn.push(draw("rect", { x: x(before), y, width: Math.max(0, end - x(before)), height: height - 12 - above, fill }));
      before += part;
    });
    const base = narrow ? y - 5 : y + 16;
    const place = narrow ? { x: width, "text-anchor": "end" } : { x: x(before) + 8 };
    words.push(draw("text", { x: 0, y: base, class: "value" }, row.label));
    words.push(draw("text", { ...place, y: base, class: row.over ? "over" : "value" }, row.words));
  });
  if (limit) {
    const spans = narrow ? rows.map((_, index) => [index * height + above, (index + 1) * height]) : [[0, rows.length * height]];
    drawn.push(...spans.map(([y1, y2]) => draw("line", { x1: x(limit), x2: x(limit), y1, y2, class: "limit" })));
    words.push(draw("text", { x: x(limit), y: rows.length * height + 15, "text-anchor": "middle" }, limitWords));
  }
  svg.replaceChildren(...drawn, ...words);
  for (const text of limit && !narrow ? words.slice(0, -1) : []) {
    const { x: start, width: length } = text.getBBox();  // words that the limit's line would cross stand behind it
    if (start > left && start < x(limit) && start + length > x(limit) - 4) text.setAttribute("x", x(limit) + 8);
  }
}

/** Draws now, and again whenever the page has another width. */
const drawings = [];
function whenSized(drawing) {
  drawings.push(drawing);
  drawing();
}
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return;
  drawnWidth = innerWidth;
  for (const drawing of drawings) drawing();
});
