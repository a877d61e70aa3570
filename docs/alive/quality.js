// What models of three sizes learn from the same tokens: validation perplexity over the steps, and scores at the end.
"use strict";

function qualityFigure() {
  const { words, steps, sizes, figures, papers } = data.quality;
  const fills = [4, 1, 0, 6, 5, 3];
  let chosen = 0;

  function curves() {
    const svg = at("quality-curves");
    const [width, height, left, bottom] = [widthOf(svg), 280, 44, 26];
    const drawn = sizes.map((size) => size.curves.map((curve) => curve.filter(([step]) => step)));
    const all = drawn.flat(2).map(([, perplexity]) => Math.log(perplexity));
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const x = (step) => left + (step / steps) * (width - left - 6);
    const y = (log) => 8 + (1 - (log - low) / (high - low)) * (height - bottom - 16);
    const lines = [];
    for (let line = 0; line <= 4; line += 1) {
      const log = low + (line / 4) * (high - low);
      lines.push(draw("line", { x1: left, x2: width, y1: y(log), y2: y(log), class: "line" }), draw("text", { x: 0, y: y(log) + 4 }, Math.exp(log).toFixed(0)));
    }
    lines.push(draw("text", { x: left, y: height - 4 }, "step 0"), draw("text", { x: width, y: height - 4, "text-anchor": "end" }, `step ${steps}`));
    drawn.forEach((seeds, index) => {
      for (const seed of seeds) {
        const d = seed.map(([step, perplexity], point) => `${point ? "L" : "M"}${x(step).toFixed(1)} ${y(Math.log(perplexity)).toFixed(1)}`).join("");
        lines.push(draw("path", { d, fill: "none", stroke: color(fills[index]), "stroke-width": 1.6 }));
      }
    });
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `Validation perplexity over ${steps} steps: ${sizes.map((size) => `${size.name}, ${size.curve} at the end`).join("; ")}`);
    svg.replaceChildren(...lines);
  }

  function scores() {
    const { values, paper, title } = figures[chosen];
    const most = Math.max(...values.map(([, , high]) => high)) || 1;
    bars(at("quality-bars"), sizes.map((size, index) => (
      { label: `${size.name}, ${size.parameters}`, parts: [values[index][0]], color: fills[index], words: figures[chosen].words[index] })), { most });
    say(at("quality-words"), paper.some(Boolean)
      ? `The paper's ${title}: ${papers.map((size, index) => paper[index] && `${paper[index]} (${size})`).filter(Boolean).join(", ")}.`
      : `The paper does not give the ${title}.`);
  }

  choices(at("quality-figures"), "quality-figure", figures.map((one) => one.title), chosen, (index) => { chosen = index; scores(); });
  legend("quality-legend", sizes.map((size, index) => [`${size.name}, ${size.parameters} parameters, each seed`, color(fills[index])]));
  at("quality-note").textContent = words;
  whenSized(curves);
  whenSized(scores);
}
qualityFigure();
