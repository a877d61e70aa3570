// The MLP on two ranks: matrices that appear step by step, with the products and sums behind each number.
"use strict";

const recorded = data.cut;
const sentence = (messages) => messages.map(([operation, , elements]) => `${operation.replace("_", "-")} of ${elements} numbers`).join(", ");

/** Value of a cell: as it is if it is a half, or else with two digits. */
const cellText = (value) => minus(Number.isInteger(value * 2) ? value : value.toFixed(2));
const exact = (value) => minus(value);
const factor = (value) => (value < 0 ? `(${minus(value)})` : minus(value));

// Entries of a lane: the name of a matrix in the recording, its title, and the sign before it. `ᵢ` stands for the rank's number.
const SCENES = {
  forward: {
    entries: [["x", "X", ""], ["a", "Aᵢ", "·"], ["xa", "XAᵢ", "="], ["y", "Yᵢ", "GeLU"], ["b", "Bᵢ", "·"], ["yb", "YᵢBᵢ", "="], ["z", "Z", "g"]],
    whole: [["x", "X"], ["a", "A", "columns"], ["b", "B", "rows"]],
    steps: [
      { shows: ["a", "b"], from: "whole", title: "Cut", told: "Each rank gets two columns of A and two rows of B. They stay there for the whole training." },
      { shows: ["x"], from: "whole", title: "f copies X", told: "Both ranks hold the whole X already, so f sends nothing in the forward pass." },
      { shows: ["xa"], product: ["x", "a"], title: "X Aᵢ", told: "Each rank computes two whole columns of X A. Nothing is missing from these sums." },
      { shows: ["y"], each: ["xa", "GeLU"], title: "GeLU", told: "GeLU can therefore run on each rank alone." },
      { shows: ["yb"], product: ["y", "b"], title: "Yᵢ Bᵢ", told: "The rows of B fit the columns of Y. Each rank has one part of every sum." },
      { shows: ["z"], sum: "yb", title: "g sums", told: `One message: an ${sentence(recorded.ranks[0].sent_forward)}. Now both ranks hold the whole Z.` },
    ],
  },
  backward: {
    entries: [["grad_z", "dZ", ""], ["b", "Bᵢ", "·"], ["grad_y", "dYᵢ", "="], ["grad_xa", "d(XAᵢ)", "GeLU′"], ["a", "Aᵢ", "·"], ["grad_x_part", "part of dX", "="], ["grad_x", "dX", "f"]],
    whole: [["grad_z", "dZ"], ["a", "A", "columns"], ["b", "B", "rows"]],
    steps: [
      { shows: ["grad_z", "a", "b"], from: "whole", title: "g copies dZ", told: "The gradient of the sum is the gradient of each of its parts. g sends nothing in the backward pass." },
      { shows: ["grad_y"], transposed: ["grad_z", "b"], title: "dYᵢ", told: "Each rank multiplies by its own Bᵢ, transposed." },
      { shows: ["grad_xa"], each: ["grad_y", "times the slope of GeLU"], title: "GeLU, backward", told: "Each number is multiplied by the slope of GeLU at its place." },
      { shows: ["grad_x_part"], transposed: ["grad_xa", "a"], title: "A part of dX", told: "Each rank knows only how X acts on its own columns of A." },
      { shows: ["grad_x"], sum: "grad_x_part", title: "f sums", told: `One message: an ${sentence(recorded.ranks[0].sent_backward)}. f and g have changed roles.` },
    ],
  },
  rows: {
    entries: [["rows_x", "Xᵢ", ""], ["rows_a", "Aᵢ", "·"], ["rows_part", "XᵢAᵢ", "="], ["rows_sum", "X A", "sum"], ["rows_y", "GeLU of the sum", "GeLU"], ["rows_gelu_part", "GeLU of the part", "or"], ["rows_wrong", "sum of the GeLUs", "sum"]],
    whole: [["x", "X", "columns"], ["a", "A", "rows"]],
    steps: [
      { shows: ["rows_x", "rows_a"], from: "whole", title: "Cut A by rows", told: "X must then be cut by columns." },
      { shows: ["rows_part"], product: ["rows_x", "rows_a"], title: "Xᵢ Aᵢ", told: "Each rank has one part of every sum of X A." },
      { shows: ["rows_sum"], sum: "rows_part", title: "A sum before GeLU", told: `A message in the middle of the MLP: an ${sentence(recorded.ranks[0].rows_sent)}.` },
      { shows: ["rows_y"], each: ["rows_sum", "GeLU"], title: "GeLU of the sum", told: "This is the right Y. Both ranks have computed all of it." },
      { shows: ["rows_gelu_part"], each: ["rows_part", "GeLU"], title: "Without that message?", told: "Suppose each rank applied GeLU to its own part." },
      { shows: ["rows_wrong"], sum: "rows_gelu_part", compared: "rows_y", title: "A wrong result", told: "GeLU(a + b) differs from GeLU(a) + GeLU(b). Marked numbers are wrong. A cut by columns needs no sum before GeLU." },
    ],
  },
};

function cutFigure() {
  const stage = at("cut-stage");
  let scene, cells, now, chosen = 0;

  const of = (rank, name) => recorded.ranks[rank][name] ?? recorded.inputs[name];
  const isSame = (name) => JSON.stringify(of(0, name)) === JSON.stringify(of(1, name));
  const titled = (title, rank) => title.replaceAll("ᵢ", subscript(rank));

  /** A matrix with its title. `mark(row, column)` says to which rank a cell of a whole matrix goes. */
  function matrix(key, values, title, mark) {
    const grid = make(`div.grid.of${values[0].length}`);
    cells[key] = values.map((row, r) => row.map((value, c) => {
      const cell = make("span", cellText(value));
      if (mark) cell.className = `rank${mark(r, c)}`;
      grid.append(cell);
      return cell;
    }));
    return make("figure.matrix", { "data-key": key }, make("figcaption", title), grid);
  }

  function build() {
    cells = {};
    const half = { columns: (r, c) => Number(c > 1), rows: (r) => Number(r > 1) };
    const whole = make("div.whole", scene.whole.map(([name, title, cut]) =>
      matrix(`whole ${name}`, recorded.inputs[name], title, half[cut])));
    const lanes = [0, 1].map((rank) => make(`div.lane.rank${rank}`, make("h3", `Rank ${rank + 1}`),
      make("div.row", scene.entries.map(([name, title, sign]) => make(isSame(name) ? "div.entry.same" : "div.entry", { "data-of": name },
        make("span.sign", sign), matrix(`${rank} ${name}`, of(rank, name), titled(title, rank)))))));
    stage.replaceChildren(whole, make("div.lanes", lanes));
  }

  /** Cells from which the numbers of a cell come. */
  function sources(rank, name, r, c) {
    const { from, product, transposed, each, sum } = now;
    const lane = (other, of) => cells[`${other} ${of}`];
    if (from) {
      const cut = scene.whole.find(([of]) => of === name.replace("rows_", ""))[2];
      const [down, right] = [cut === "rows" ? 2 * rank : 0, cut === "columns" ? 2 * rank : 0];
      return [cells[`whole ${name.replace("rows_", "")}`][r + down][c + right]];
    }
    if (product) return [...lane(rank, product[0])[r], ...lane(rank, product[1]).map((row) => row[c])];
    if (transposed) return [...lane(rank, transposed[0])[r], ...lane(rank, transposed[1])[c]];
    return (sum ? [0, 1] : [rank]).map((other) => lane(other, sum ?? each[0])[r][c]);
  }

  function formula(rank, name, r, c) {
    const { product, transposed, each, sum } = now;
    const result = exact(of(rank, name)[r][c]);
    if (sum) return `${exact(of(0, sum)[r][c])} + ${factor(of(1, sum)[r][c])} = ${result}`;
    if (each) return each[1] === "GeLU" ? `GeLU(${exact(of(rank, each[0])[r][c])}) = ${result}` : `${exact(of(rank, each[0])[r][c])} ${each[1]} = ${result}`;
    if (!product && !transposed) return "";
    const left = of(rank, (product ?? transposed)[0])[r];
    const right = product ? of(rank, product[1]).map((row) => row[c]) : of(rank, transposed[1])[c];
    return `${left.map((value, k) => `${factor(value)} × ${factor(right[k])}`).join(" + ")} = ${result}`;
  }

  /** The cells of the step's result, on both ranks. */
  function results() {
    const name = now.shows[0];
    return [0, 1].flatMap((rank) => cells[`${rank} ${name}`].flatMap((row, r) => row.map((cell, c) => ({ cell, rank, name, r, c }))));
  }

  function choose(index) {
    const all = results();
    chosen = (index + all.length) % all.length;
    for (const cell of stage.querySelectorAll(".source, .chosen")) cell.classList.remove("source", "chosen");
    if (now.from) return say(at("cut-formula"), "");
    const { cell, rank, name, r, c } = all[chosen];
    cell.classList.add("chosen");
    for (const source of sources(rank, name, r, c)) source.classList.add("source");
    say(at("cut-formula"), `Rank ${rank + 1}: ${formula(rank, name, r, c)}`);
  }

  /** A copy of a number moves from its source to its place, after `delay` milliseconds. */
  function fly(source, target, delay) {
    const [start, end, frame] = [source, target, stage].map((one) => one.getBoundingClientRect());
    const copy = make("span.flying", { "aria-hidden": "true" }, source.textContent);
    copy.style.left = `${end.left - frame.left}px`;
    copy.style.top = `${end.top - frame.top}px`;
    copy.style.width = `${end.width}px`;
    stage.append(copy);
    const from = `translate(${start.left - end.left}px, ${start.top - end.top}px)`;
    const path = [{ transform: from, opacity: 0 }, { transform: from, opacity: 0.9, offset: 0.1 }, { transform: "none", opacity: 0.5 }];
    const timing = { duration: 600, delay, fill: "backwards", easing: "ease-in-out" };
    copy.animate(path, timing).finished.then(() => copy.remove(), () => {});
    target.animate([{ opacity: 0 }, { opacity: 0, offset: 0.8 }, { opacity: 1 }], timing);
  }

  function show(step, moves) {
    const shown = new Set(scene.steps.slice(0, step + 1).flatMap((one) => one.shows));
    now = scene.steps[step];
    for (const flying of stage.querySelectorAll(".flying")) flying.remove();
    for (const entry of stage.querySelectorAll(".entry")) {
      entry.classList.toggle("hidden", !shown.has(entry.dataset.of));
      entry.classList.toggle("current", now.shows.includes(entry.dataset.of));
    }
    if (now.compared) {
      for (const { cell, rank, name, r, c } of results()) cell.classList.toggle("wrong", of(rank, name)[r][c] !== of(rank, now.compared)[r][c]);
    }
    at("cut-told").replaceChildren(make("strong", `${now.title}. `), now.told);
    choose(0);
    if (!moves) return;
    const pause = now.product || now.transposed ? 160 : 40;  // so that one product after the other can be seen
    for (const name of now.shows) {
      for (const rank of [0, 1]) cells[`${rank} ${name}`].forEach((row, r) => row.forEach((cell, c) => {
        for (const source of sources(rank, name, r, c)) fly(source, cell, pause * (r * row.length + c));
      }));
    }
  }

  const restart = stepper("cut", show, { ArrowUp: () => choose(chosen - 1), ArrowDown: () => choose(chosen + 1) });
  stage.addEventListener("click", (event) => {
    const index = results().findIndex(({ cell }) => cell === event.target);
    if (index >= 0) choose(index);
  });
  const start = (name) => {
    scene = SCENES[name];
    build();
    restart(scene.steps.length);
  };
  for (const input of document.querySelectorAll("[name=scene]")) input.addEventListener("change", () => start(input.value));
  start("forward");
}
cutFigure();
