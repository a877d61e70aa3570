// A layer on its ranks: where f and g stand, and in which pass each of them sends.
"use strict";

function layerFigure() {
  const { model, ranks, batch, length, hidden, messages } = data.layer;
  // From top to bottom; a word is what all ranks hold, a pair what each rank holds, an operator f or g with the tensor
  // that the planner names.
  const rows = [
    { told: "X on every rank, then a norm" },
    { operator: "f", tensor: "attention input" },
    { pair: "attention, its own heads" },
    { operator: "g", tensor: "attention output" },
    { told: "add X, then a norm" },
    { operator: "f", tensor: "mlp input" },
    { pair: "GeLU(X Aᵢ) Bᵢ" },
    { operator: "g", tensor: "mlp output" },
    { told: "add, on every rank" },
  ];
  const down = rows.map((_, index) => ["forward", index]);
  const steps = [...down, ...rows.map((_, index) => ["backward", rows.length - 1 - index])];
  const sent = ({ tensor }, phase) => messages.find((one) => one.purpose === tensor && one.phase === phase);

  at("layer-words").textContent = `One layer of the ${model} model on ${ranks} tensor ranks, ${batch} sequences of ` +
    `${whole.format(length)} tokens, hidden size ${whole.format(hidden)}. The forward pass runs downwards, the backward pass upwards.`;
  const drawn = rows.map((row) => {
    if (row.told) return make("div.box", row.told);
    if (row.pair) return make("div.pair", make("div.box", `rank 1: ${row.pair.replaceAll("ᵢ", subscript(0))}`), make("div.box", `ranks 2 to ${ranks}: the same`));
    return make("div.operator", make("span.wire"), make("b", row.operator), make("span.wire"));
  });
  at("layer-stage").append(make("div.flow", drawn));

  function show(step) {
    const [phase, index] = steps[step];
    const done = steps.slice(0, step + 1).map(([of, at]) => sent(rows[at], of)).filter(Boolean);
    rows.forEach((row, at) => {
      const isNow = at === index;
      drawn[at].classList.toggle("current", isNow);
      for (const box of drawn[at].querySelectorAll(".box")) box.classList.toggle("current", isNow);
      if (row.operator) drawn[at].classList.toggle("sends", Boolean(sent(row, phase)));
    });
    const row = rows[index];
    const message = row.operator && sent(row, phase);
    const told = message
      ? `${row.operator}: all-reduce of the ${row.tensor}, b s h = ${whole.format(message.elements)} elements. A rank sends ${bytes(message.bytes)}.`
      : row.operator ? `${row.operator} sends nothing: ${row.operator === "f" ? "every rank already holds the tensor." : "the gradient of a sum is the gradient of its parts."}`
        : row.pair ? "Each rank computes its own part. Nothing is sent." : "Every rank computes the same. Nothing is sent.";
    at("layer-told").replaceChildren(make("strong", phase === "forward" ? "Forward. " : "Backward. "), told,
      make("br"), `Sent so far: ${done.length} of ${messages.length} messages, ${bytes(done.reduce((sum, one) => sum + one.bytes, 0))}.`);
  }
  stepper("layer", show)(steps.length);
}
layerFigure();
