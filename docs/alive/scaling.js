// The paper's percentages of scaling, kept apart: what each is a share of, with our forecast beside it.
"use strict";

function scalingFigure() {
  const share = (value) => `${(100 * value).toFixed(1)}%`;
  const parts = data.scaling.map((one) => {
    const svg = draw("svg", { role: "img" });
    return { one, svg, holder: make("div.share", make("h3", `${Math.round(100 * one.paper)}%: ${one.place}`),
      make("p.fraction", make("span", one.of), make("span", one.by)), svg, make("p.note", one.note)) };
  });
  at("scaling-bars").append(...parts.map(({ holder }) => holder));
  whenSized(() => {
    for (const { one, svg } of parts) {
      bars(svg, [
        { label: "paper", parts: [one.paper], color: 3, words: share(one.paper) },
        { label: "our forecast", parts: [one.ours], color: 0, words: `${share(one.ours)}, ${minus(`${one.ours < one.paper ? "" : "+"}${(100 * (one.ours - one.paper)).toFixed(1)}`)} points` },
      ], { most: 1 });
    }
  });
  at("scaling-note").textContent = "Only the rate of one GPU calibrates the forecasts. The page of published scaling in docs/ has all rows, and " +
    "what the paper's program does besides.";
}
scalingFigure();
