// The two orders of a layer, and recorded training losses of small models of several depths.
"use strict";

function normsFigure() {
  const { machine, steps, guess, depths, rates, losses, scores } = data.norms;
  const places = [["after", 5], ["before", 0]];
  let [depth, rate] = [depths.at(-1), rates[2] ?? rates.at(-1)];

  /** One order of a layer: the residual stream runs from left to right, with norms on it or beside it. */
  function order(place, top, width) {
    const at = (share) => 8 + share * (width - 16);
    const box = (share, y, words, fill, size = 92) => [
      draw("rect", { x: at(share) - size / 2, y: y - 14, width: size, height: 28, rx: 6, fill, class: "part" }),
      draw("text", { x: at(share), y: y + 4, "text-anchor": "middle", class: "value" }, words),
    ];
    const size = Math.min(92, width / 4.4);
    const stream = draw("line", { x1: at(0), x2: at(1), y1: top, y2: top, stroke: "var(--ink)", "stroke-width": 2 });
    const parts = [stream];
    for (const [start, words] of [[0.02, "attention"], [0.52, "MLP"]]) {
      const [branch, sum] = [start, start + 0.36];
      const y = top + 44;
      parts.push(draw("path", { d: `M${at(branch)} ${top} V${y} H${at(sum)} V${top}`, fill: "none", stroke: "var(--soft)" }));
      if (place === "before") parts.push(...box(branch + 0.085, y, "norm", "var(--first)", size * 0.5), ...box(branch + 0.24, y, words, "var(--sheet)", size * 0.85));
      else parts.push(...box(branch + 0.18, y, words, "var(--sheet)", size * 0.85), ...box(sum + 0.075, top, "norm", "var(--second)", size * 0.5));
      parts.push(draw("circle", { cx: at(sum), cy: top, r: 9, fill: "var(--sheet)", stroke: "var(--ink)" }),
        draw("text", { x: at(sum), y: top + 4, "text-anchor": "middle", class: "value" }, "+"));
    }
    parts.push(draw("text", { x: 0, y: top - 20, class: "value" }, `norms ${place} the ${place === "after" ? "sums" : "sublayers"}`));
    return parts;
  }

  function blocks() {
    const svg = at("norms-blocks");
    const width = Math.min(widthOf(svg), 620);
    svg.setAttribute("viewBox", `0 0 ${widthOf(svg)} 210`);
    svg.setAttribute("aria-label", "Norms after the sums stand on the residual stream. Norms before the sublayers stand beside it.");
    svg.replaceChildren(...order("after", 36, width), ...order("before", 140, width));
  }

  function curves() {
    const svg = at("norms-curves");
    const [width, height, left, bottom] = [widthOf(svg), 260, 36, 26];
    const all = Object.values(losses).flat(2);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const y = (loss) => 8 + (1 - (loss - low) / (high - low)) * (height - bottom - 8);
    const points = Object.values(losses)[0][0].length;
    const x = (index) => left + ((index + 1) / points) * (width - left - 4);
    const drawn = [draw("line", { x1: left, x2: width, y1: y(guess), y2: y(guess), class: "limit" }),
      draw("text", { x: width, y: y(guess) - 6, "text-anchor": "end" }, `guess from frequencies: ${guess.toFixed(2)}`)];
    for (let loss = Math.ceil(low); loss <= high; loss += 1) {
      drawn.push(draw("line", { x1: left, x2: width, y1: y(loss), y2: y(loss), class: "line" }), draw("text", { x: 0, y: y(loss) + 4 }, loss));
    }
    drawn.push(draw("text", { x: left, y: height - 4 }, "step 0"), draw("text", { x: width, y: height - 4, "text-anchor": "end" }, `step ${steps}`));
    for (const [place, fill] of places) {
      for (const run of losses[`${place} ${depth} ${rate}`] ?? []) {
        const d = run.map((loss, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(loss).toFixed(1)}`).join("");
        drawn.push(draw("path", { d, fill: "none", stroke: color(fill), "stroke-width": 1.6 }));
      }
    }
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", at("norms-words").textContent);
    svg.replaceChildren(...drawn);
  }

  function show() {
    const told = places.map(([place]) => {
      const score = scores[`${place} ${depth} ${rate}`];
      const [middle, low, high] = (score ?? []).map((loss) => loss.toFixed(3));
      return score ? `norms ${place}: ${middle} (${low} to ${high})` : `norms ${place}: not run`;
    });
    say(at("norms-words"), `Validation loss of ${depth} layers at a rate of ${rate} after ${steps} steps, median of the seeds and their range: ${told.join("; ")}.`);
    curves();
  }

  choices(at("norms-depths"), "depth", depths.map((number) => `${number} layers`), depths.indexOf(depth), (index) => { depth = depths[index]; show(); });
  choices(at("norms-rates"), "rate", rates, rates.indexOf(rate), (index) => { rate = rates[index]; show(); });
  legend("norms-legend", places.map(([place, fill]) => [`norms ${place}, each seed`, color(fill)]));
  at("norms-note").textContent = `Training losses of small models that predict the next token, ${machine.date}, ${machine.device}. ` +
    "They train for far fewer steps than the paper's BERTs.";
  whenSized(blocks);
  whenSized(show);
}
normsFigure();
