// Histograms and bars in HTML, which wrap, scale with the font size, and can be read by screen readers.
"use strict";

/** One row per entry: name, bar, figure. `gone` selects the entries that are shown as dropped. */
function bars(entries, { gone = () => false, label = (entry) => entry.name, shown = 12 } = {}) {
  const total = entries.reduce((sum, entry) => sum + value(entry), 0);
  const largest = Math.max(...entries.map((entry) => value(entry)), 1);
  const ordered = [...entries].sort((a, b) => value(b) - value(a));
  const row = (entry) => make(gone(entry) ? "li.gone" : "li", { "--share": `${(100 * value(entry)) / largest}%` },
    make("span.label", label(entry)), make("span.bar"), make("span.number", figure(entry)),
    make("span.number.soft", percent(value(entry), total)));
  const rest = ordered.slice(shown);
  return [
    make("ul.bars", ordered.slice(0, shown).map(row)),
    rest.length > 0 && make("details", make("summary.plain", `${rest.length} more`), make("ul.bars", rest.map(row))),
  ];
}

/** Adjacent columns, each from one edge to the next. Columns below `cut` are dropped. `count` gives a column's height, `spelled` its text. */
function histogram(columns, { cut = -Infinity, name, edge, axis = "", count = value, spelled = figure }) {
  const largest = Math.max(...columns.map((column) => count(column)), 1);
  const total = columns.reduce((sum, column) => sum + count(column), 0);
  const told = (column, i) => {
    const to = columns[i + 1]?.from;
    const range = to === undefined ? `${edge(column.from)} and more` : `${edge(column.from)} to ${edge(to)}`;
    return `${range}: ${spelled(column)} (${percent(count(column), total)})`;
  };
  const list = make("ol", { "aria-label": name }, columns.map((column, i) => make(
    column.from < cut ? "li.gone" : "li",
    { "--share": `${(100 * count(column)) / largest}%`, title: told(column, i) },
    make("span.bar"), make("span.unseen", told(column, i)),
    make("span.edge", { "aria-hidden": "true" }, edge(column.from)),
  )));
  new ResizeObserver(() => spaceEdges(list)).observe(list);
  return make("figure.histogram", list, axis && make("figcaption", axis));
}

/** Show only every n-th label below the columns, with the smallest n (a power of 2) that keeps the labels apart. */
function spaceEdges(list) {
  const edges = [...list.querySelectorAll(".edge")];
  const column = list.firstElementChild.offsetWidth;
  if (!column) return;
  const widest = Math.max(...edges.map((edge) => edge.offsetWidth));
  let step = 1;
  while (step < edges.length && step * column < widest + 6) step *= 2;
  edges.forEach((edge, i) => edge.classList.toggle("without", i % step > 0 || i * column + edge.offsetWidth > list.clientWidth + 1));
}

/** All buckets from the first to the last, including empty ones. */
function filled(columns, next) {
  const known = new Map(columns.map((column) => [column.from, column]));
  const ordered = [...known.keys()].sort((a, b) => a - b);
  const all = [];
  for (let from = ordered[0]; from <= ordered.at(-1) + 1e-9 && all.length < 200; from = next(from)) {
    all.push(known.get(from) ?? { from, documents: 0, bytes: 0, tokens: 0 });
  }
  return all;
}

const nextLength = (from) => {
  if (from < 2) return from + 1;
  const power = 2 ** Math.floor(Math.log2(from));
  return from === power && power > 1 ? from * 1.5 : power * 2;
};
const nextScore = (from) => Math.round((from + 0.05) * 100) / 100;
