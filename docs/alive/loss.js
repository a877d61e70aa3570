// What the loss sends: all logits, the paper's number for each token, and our three.
"use strict";

function lossFigure() {
  const { controls, first, grid } = data.loss;
  const sliders = Object.entries(controls).map(([name, values], index) => {
    const output = make("output");
    const input = make("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: first[index], input: show });
    at("loss-controls").append(make("label.slider", name, input, output));
    return { input, output, values };
  });

  function show() {
    for (const { input, output, values } of sliders) {
      say(output, values[input.value]);
      input.setAttribute("aria-valuetext", values[input.value]);
    }
    const numbers = grid[sliders.map(({ input }) => input.value).join(" ")];
    const names = ["gathering: b s V", "the paper: b s", "Crosscut: 3 b s"];
    const rows = names.map((label, index) => {
      const [elements, sent] = numbers.slice(2 * index);
      return { label, parts: [sent], color: [5, 3, 0][index], words: `${short(elements)} elements, ${bytes(sent)}` };
    });
    const most = Math.max(...Object.values(grid).map(([, sent]) => sent));
    bars(at("loss-bars"), rows, { scale: (sent) => Math.log10(Math.max(1, sent)), most });
    say(at("loss-words"), `Gathering sends ${whole.format(numbers[1] / numbers[5])} times the bytes of Crosscut's loss. ` +
      "Bytes are those that a rank sends in one step: logits in float16, with the padding of the vocabulary, and our numbers in float32. The bars are logarithmic and begin at one byte.");
  }

  function table() {
    const { ranks, target } = data.cut;
    const value = (rank, name) => minus(ranks[rank][name][0][0]);
    const rows = [
      ["logits", ...[0, 1].map((rank) => ranks[rank].logits[0].map(minus).join(", ")), ""],
      ["largest (maximum)", value(0, "largest"), value(1, "largest"), value(0, "most")],
      ["exp(logit − largest) (sum)", value(0, "sum_part"), value(1, "sum_part"), value(0, "sum")],
      [`logit of the target, word ${target} (sum)`, value(0, "target_part"), value(1, "target_part"), value(0, "target")],
      ["loss = log(sum) + largest − target", "", "", value(0, "loss")],
    ];
    at("loss-table").replaceChildren(
      make("thead", make("tr", ["one token", "rank 1", "rank 2", "all-reduce"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", rows.map((row) => make("tr", row.map((cell) => make("td", cell))))));
    const each = ranks[0].logits[0].length;
    const sent = ranks[0].loss_sent.map(([, , elements]) => elements);
    say(at("loss-note"), `Recorded on two ranks: words 0 to ${each - 1} on rank 1, ${each} to ${2 * each - 1} on rank 2. ` +
      `They send ${sent.length} messages, of ${sent.join(" and ")} numbers.`);
  }

  table();
  whenSized(show);
}
lossFigure();
