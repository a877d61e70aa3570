// Memory of a rank of the paper's models over tensor ranks, beside the memory of a V100.
"use strict";

function memoryFigure() {
  const { device, limit, categories, models, precision, batch } = data.memory;
  const sum = (parts) => parts.reduce((total, part) => total + part, 0);
  const gigabytes = (megabytes) => `${(megabytes / 1000).toFixed(1)} GB`;
  const names = categories.map((name) => name.replaceAll("_", " "));
  const used = names.flatMap((name, index) => (models.some(({ rows }) => rows.some(({ parts }) => parts[index])) ? [[name, color(index)]] : []));
  let chosen = models.length - 1;

  function show() {
    const { name, paper, rows } = models[chosen];
    const fits = ({ parts }) => sum(parts) <= limit;
    bars(at("memory-bars"), rows.map((row) => ({
      label: row.tensor === 1 ? "1 rank" : `${row.tensor} tensor ranks`, parts: row.parts, over: !fits(row),
      words: `${gigabytes(sum(row.parts))}${fits(row) ? "" : ", does not fit"}`,
    })), { most: Math.max(limit, ...rows.map(({ parts }) => sum(parts))), limit, limitWords: gigabytes(limit) });
    say(at("memory-words"), `The ${name} model fits from ${rows.find(fits).tensor} tensor rank${rows.find(fits).tensor === 1 ? "" : "s"} on. The paper uses ${paper}.`);
  }

  function table() {
    const tensors = models[0].rows.map(({ tensor }) => tensor);
    const cell = (row) => (row ? make(sum(row.parts) <= limit ? "td.fits" : "td.over", (sum(row.parts) / 1000).toFixed(1)) : make("td", NONE));
    at("memory-table").replaceChildren(
      make("thead", make("tr", ["GB of a rank", ...tensors].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", models.map(({ name, rows }) => make("tr", make("td", name), tensors.map((tensor) => cell(rows.find((row) => row.tensor === tensor)))))));
  }

  choices(at("memory-models"), "memory-model", models.map(({ name }) => name), chosen, (index) => { chosen = index; show(); });
  legend("memory-legend", used);
  table();
  at("memory").querySelector("table").after(make("p.note", `${device}. The paper's training: ${precision}, micro-batches of ${batch} sequences, whole ` +
    "layers recomputed, no data parallelism. A dash: the model's heads cannot be divided by this number of ranks."));
  whenSized(show);
}
memoryFigure();
