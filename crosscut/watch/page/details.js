// Marks, samples and settings.
"use strict";

/** A section that is drawn anew only if its content has changed. */
class Section {
  constructor(title, note, content, draw) {
    [this.content, this.make] = [content, draw];
    this.body = make("div.body");
    this.note = make("p.note");
    this.noteOf = note;
    this.element = make("section.detail", { hidden: true, "aria-label": title }, make("h2", title), this.note, this.body);
  }

  draw() {
    const content = this.content();
    if (content === this.drawn) return;
    this.drawn = content;
    const seen = JSON.stringify(content ?? null);
    if (seen === this.seen) return;
    this.seen = seen;
    this.element.hidden = content === null || content === undefined;
    if (this.element.hidden) return;
    say(this.note, typeof this.noteOf === "function" ? this.noteOf(content) : this.noteOf);
    this.body.replaceChildren(...[this.make(content)].flat(Infinity).filter(Boolean));
  }
}

/** Events of the run in focus, newest first. Checkpoints are counted. */
function marksContent() {
  const marks = focused()?.parts.marks ?? [];
  const events = marks.filter((mark) => mark.kind !== "checkpoint");
  return events.length ? events : null;
}

function drawEvents(events) {
  return table("Events of the run", ["#Step", "Event", "What happened"], [...events].reverse().slice(0, 200).map((mark) => [
    whole.format(mark.step), make("span.event", make("i", { "--mark": `var(${MARKS[mark.kind]?.[1] ?? "--soft"})`, "data-kind": mark.kind }), MARKS[mark.kind]?.[0] ?? mark.kind), mark.text]));
}

/** Samples of the run in focus, chosen by step. */
function drawSamples(samples) {
  const steps = [...new Set(samples.map((sample) => sample.step))];
  const texts = make("div.samples");
  const output = make("output", { for: "sample-step" });
  const slider = make("input", { id: "sample-step", type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Step of the samples", input: () => show() });
  const show = () => {
    const chosenStep = steps[Number(slider.value)];
    output.textContent = chosenStep === null ? "at the end" : `step ${whole.format(chosenStep)}`;
    slider.setAttribute("aria-valuetext", output.textContent);
    texts.replaceChildren(...samples.filter((sample) => sample.step === chosenStep).map((sample) => {
      const begins = sample.text.startsWith(sample.prompt);
      return make("blockquote", make("span.prompt", sample.prompt), begins ? sample.text.slice(sample.prompt.length) : ` ${sample.text}`);
    }));
  };
  show();
  return [steps.length > 1 && make("p.choice", slider, output), texts];
}

/** Settings by their dotted names. */
function flat(config, before = "", found = new Map()) {
  for (const [key, value] of Object.entries(config ?? {})) {
    if (value && typeof value === "object" && !Array.isArray(value)) flat(value, `${before}${key}.`, found);
    else found.set(before + key, Array.isArray(value) ? value.map(String).join(", ") : String(value));
  }
  return found;
}

/** Settings that differ between the chosen runs. */
function differences() {
  const shown = visible().filter((run) => run.parts.config);
  if (shown.length < 2) return null;
  const configs = shown.map((run) => flat(run.parts.config));
  const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))].sort();
  const rows = keys.map((key) => [key, ...configs.map((config) => config.get(key) ?? NONE)])
    .filter(([key, first, ...rest]) => key !== "output.folder" && rest.some((value) => value !== first));
  return { names: shown.map((run) => [run.name, run.color]), rows };
}

function drawDifferences({ names, rows }) {
  if (!rows.length) return make("p", "All settings are equal.");
  if (names.length <= 6) {
    return table("Settings that differ", ["Setting", ...names.map(([name]) => name)], rows.map(([key, ...values]) => [make("code", key), ...values]));
  }
  return table("Settings that differ", ["Run", ...rows.map(([key]) => key)], names.map(([name], i) => [name, ...rows.map((row) => row[i + 1])]));
}

function drawSettings(config) {
  const rows = [...flat(config)].map(([key, value]) => [make("code", key), value]);
  return make("details", make("summary", `${rows.length} settings`), table("Settings of the run", ["Setting", "Value"], rows));
}

function drawNotes(notes) {
  return make("ul.notes", notes.map((note) => make("li", note)));
}

const sections = [
  new Section("Files that are not shown", "", () => (focused()?.parts.notes?.length ? focused().parts.notes : null), drawNotes),
  new Section("Events", "Spikes, rollbacks, hangs, restarts and changes of layout of this run.", marksContent, drawEvents),
  new Section("Ranks", (told) => ranksNote(told), () => focused()?.parts.ranks ?? null, (told) => drawRanks(told)),
  new Section("Learning rates by group", "The chart shows the rate of the groups that have no rate of their own. All rates follow the same schedule; the factor is a group's multiple of the chart.", () => focused()?.parts.rates ?? null, (told) => drawRates(told)),
  new Section("Experts", (told) => loadsNote(told), () => loadsContent(), (told) => drawLoads(told)),
  new Section("Samples", "Texts that the model wrote. The prompt is grey.", () => (focused()?.parts.samples?.length ? focused().parts.samples : null), drawSamples),
  new Section("Settings that differ", "Settings of the chosen runs, without those that all of them share.", differences, drawDifferences),
  new Section("Settings", "", () => focused()?.parts.config ?? null, drawSettings),
];
