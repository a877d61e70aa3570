// Loads of the experts: steps from left to right, experts from top to bottom.
"use strict";

/** Loads of the run in focus, or null. */
const loadsContent = () => (focused()?.parts.loads?.steps.length ? focused().parts.loads : null);

function loadsNote({ steps }) {
  return `Tokens of each expert, as multiples of the mean: green is less, orange more. Steps ${whole.format(steps[0])} to ${whole.format(steps.at(-1))}.`;
}

/** One picture per layer. */
function drawLoads({ steps, layers }) {
  return make("div.loads", Object.entries(layers).map(([name, rows]) => {
    const last = rows.at(-1);
    const [least, most] = [Math.min(...last), Math.max(...last)];
    const words = `least ${digits(least, 3)} (expert ${last.indexOf(least)}), most ${digits(most, 3)} (expert ${last.indexOf(most)})`;
    const canvas = make("canvas", { width: steps.length, height: last.length, role: "img", "aria-label": `${name}: loads at step ${whole.format(steps.at(-1))}: ${words}` });
    paint(canvas, rows);
    const output = make("span.words", words);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const i = Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)));
      const expert = Math.min(last.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * last.length)));
      say(output, `step ${whole.format(steps[i])}, expert ${expert}: ${digits(rows[i][expert], 3)}`);
    });
    canvas.addEventListener("pointerleave", () => say(output, words));
    return make("figure.load", make("figcaption", make("h3", name), output), canvas);
  }));
}

/** Colours of a load: from none (green) by the mean (the sheet's colour) to twice the mean and more (orange). */
function paint(canvas, rows) {
  const context = canvas.getContext("2d");
  const ends = ["--low", "--even", "--high"].map((name) => components(colorOf(`var(${name})`)));
  const image = context.createImageData(canvas.width, canvas.height);
  rows.forEach((loads, x) => loads.forEach((load, y) => {
    const share = Math.min(Math.abs(load - 1), 1) ** 0.8;
    const end = ends[load < 1 ? 0 : 2];
    for (let i = 0; i < 3; i++) image.data[4 * (y * canvas.width + x) + i] = ends[1][i] + share * (end[i] - ends[1][i]);
    image.data[4 * (y * canvas.width + x) + 3] = 255;
  }));
  context.putImageData(image, 0, 0);
}

/** Red, green and blue of a colour, from 0 to 255. */
function components(color) {
  const context = make("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  context.fillStyle = color;
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}
