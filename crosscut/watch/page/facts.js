// The list of runs, and the state of the run in focus.
"use strict";

const STATES = { running: "running", finished: "finished", stopped: "stopped", killed: "killed", gone: "folder is gone" };

/** The list of runs: each can be shown or hidden, and one of them is in focus. */
function drawList(onChange) {
  const list = at("runs");
  const known = new Map([...list.children].map((row) => [row.dataset.id, row]));
  for (const run of runs.values()) {
    const row = known.get(run.id) ?? makeRow(run, onChange);
    if (!known.has(run.id)) list.append(row);
    const [box, button, state] = row.parts;
    box.checked = chosen.has(run.id);
    box.setAttribute("aria-label", `Show ${run.name}`);
    say(button, run.name);
    button.title = run.listed.folder;
    button.setAttribute("aria-pressed", run.id === focus);
    say(state, stateWords(run));
    row.dataset.state = run.listed.state;
  }
  at("choose").hidden = runs.size < 2;
  at("more").hidden = !leftOut;
  say(at("more"), `${whole.format(leftOut)} more runs are not shown. Name fewer folders to see them.`);
  document.body.classList.toggle("alone", runs.size < 2);
}

function makeRow(run, onChange) {
  const box = make("input", { type: "checkbox", change: () => {
    chosen[box.checked ? "add" : "delete"](run.id);
    if (!chosen.has(focus)) focus = [...chosen][0] ?? run.id;
    onChange();
  } });
  const button = make("button.name", { type: "button", click: () => { chosen.add(run.id); focus = run.id; onChange(); } });
  const state = make("span.state");
  const row = make("li", { "data-id": run.id, "--run": run.color }, box, button, state);
  row.parts = [box, button, state];
  return row;
}

function stateWords(run) {
  const { state, steps } = run.listed;
  const step = run.listed.step ?? 0;
  if (state === "gone") return STATES.gone;
  return `${STATES[state] ?? state}, step ${whole.format(step)}${steps && step < steps ? ` of ${whole.format(steps)}` : ""}`;
}

/** Median of the last figures of a name. */
function recent(run, name, most = 50) {
  const values = [...(run.series.get(name)?.values.view().slice(-most) ?? [])].filter(Number.isFinite).sort((a, b) => a - b);
  return values.length ? values[values.length >> 1] : NaN;
}

/** The best validation, with its step. */
function best(run, name) {
  const series = run.series.get(name);
  if (!series) return null;
  const values = series.values.view();
  let found = -1;
  values.forEach((value, i) => { if (Number.isFinite(value) && (found < 0 || value < values[found])) found = i; });
  return found < 0 ? null : { value: values[found], step: series.steps.view()[found] };
}

function factsOf(run) {
  const { state, steps, state_words: words } = run.listed;
  const step = run.lastStep();
  const last = best(run, "validation_loss");
  const losses = run.series.get("loss");
  const loss = losses?.smoothed(axes.weight).at(-1);
  const left = (steps - step) * recent(run, "seconds");
  const elapsed = run.last("elapsed_seconds");
  const tokens = run.last("samples") * run.listed.tokens_per_sample;
  const validation = run.last("validation_loss");
  return [
    ["State", STATES[state] ?? state, words],
    ["Step", whole.format(step), steps ? `of ${whole.format(steps)}${steps > step ? ` (${percent(step / steps)})` : ""}` : ""],
    ["Loss", digits(loss), losses?.weightFor(axes.weight) > 0 ? "smoothed" : "last step"],
    last && ["Validation", digits(validation), digits(last.value) !== digits(validation) ? `best ${digits(last.value)} (${whole.format(last.step)})` : "the best so far"],
    ["Speed", Number.isFinite(recent(run, "tokens_per_second")) ? `${rate(recent(run, "tokens_per_second"))}` : NONE, "tokens/s"],
    Number.isFinite(recent(run, "utilisation")) && ["Share of peak", percent(recent(run, "utilisation")), "last 50 steps"],
    state === "running" && steps > step ? ["Time left", duration(left), "without validations"] : ["Time", duration(elapsed), "of all steps"],
    Number.isFinite(tokens) && ["Tokens", short(tokens), run.parts.ranks?.layout ?? run.parts.summary?.layout ?? ""],
  ].filter(Boolean);
}

/** Figures of the run in focus. The elements stay, so that only their texts change. */
function drawFacts() {
  const run = focused();
  const place = at("facts");
  const facts = run ? factsOf(run) : [];
  while (place.children.length > facts.length) place.lastChild.remove();
  facts.forEach(([name, value, words], i) => {
    if (!place.children[i]) place.append(make("div.fact", make("span.label"), make("strong"), make("span.words")));
    const [label, strong, small] = place.children[i].children;
    say(label, name);
    say(strong, value);
    say(small, words || "");
    small.title = words || "";
  });
  place.dataset.state = run?.listed.state ?? "";
  const title = run ? run.name : "Runs";
  say(document.querySelector("h1"), title);
  document.title = run ? `${title}, step ${whole.format(run.lastStep())}` : "Crosscut watch";
}
