// The first screen, and the dropped documents of each stage, with samples.
"use strict";

function section(id, title, ...content) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), content);
}

const ratio = (share, digits = 1) => percent(share, 1, digits);

// The most important figures.

function answers() {
  const { read: came, kept, words } = report.summary ?? {};
  const cards = [];
  if (came && kept) {
    if (words.read) cards.push(card("Read", figure(came), `${unit() === "bytes" ? "" : `${unit()} `}${words.read}`, "#stage-ingest"));
    cards.push(card("Kept", percent(value(kept), value(came)),
      `${figure(kept)} of ${figure(came)}${unit() === "bytes" ? "" : ` ${unit()}`}; ${words.kept}`, "#losses"));
  }
  const planted = report.duplicates?.planted;
  if (planted?.planted) {
    cards.push(card("Duplicates found", ratio(planted.recall, 2),
      `${whole.format(planted.found)} of ${whole.format(planted.planted)} near-duplicates planted in this corpus`
        + (planted.precision === null ? "" : `; precision ${ratio(planted.precision, 2)}`), "#duplicates"));
  }
  const sets = report.leakage?.sets ?? [];
  if (sets.length) {
    const share = (one) => one.grams_found / Math.max(one.grams, 1);
    const worst = sets.reduce((most, one) => (share(one) > share(most) ? one : most));
    cards.push(card("Test data", worst.grams_found ? percent(worst.grams_found, worst.grams, 2) : "none",
      worst.grams_found
        ? `of the ${report.leakage.ngram}-grams of ${worst.name} were in the corpus${sets.length > 1 ? ", the most of any test set" : ""}`
        : `of the ${report.leakage.ngram}-grams of ${sets.map((one) => one.name).join(", ")} was in the corpus`, "#leakage"));
  }
  return cards;
}

function card(kind, number, told, href) {
  return make("a.card", { href }, make("span.kind", kind), make("strong", number), make("span", told));
}

function overview() {
  const flow = make("figure.flow");
  const draw = drawn(flow, () => (flow.clientWidth ? drawFlow(flow.clientWidth) : []));
  let width = 0;
  new ResizeObserver(() => {
    if (flow.clientWidth === width) return;
    width = flow.clientWidth;
    flow.replaceChildren(drawFlow(width));
  }).observe(draw);
  return make("section", { id: "overview", "aria-label": "Overview" },
    drawn(make("div.cards"), answers), flow);
}

// Dropped documents and reasons.

function losses() {
  const place = make("div");
  place.append(...report.flow.map(stageBlock));
  return section("losses", "Dropped documents, and why", search(place), place);
}

function stageBlock(entry) {
  const rules = Object.entries(entry.rules);
  const amounts = drawn(make("p.amounts"), () => {
    const came = has(entry.in) ? figure(entry.in) : null;
    const [before, , after] = verbs(entry);
    return [came && `${came} ${before}, `, make("strong", figure(entry.out)), ` ${after}`];
  });
  return make("article.stage", { id: `stage-${entry.stage}` },
    make("header", make("h3", titleOf(entry.stage)), amounts),
    STAGES[entry.stage] && make("p.note", STAGES[entry.stage][1]),
    rules.map(([name, amount]) => rule(entry, name, amount)),
    entry.stage === "ingest" && [damagedBlock(), leftOutBlock(), replacedBlock()],
    cutBlock(entry), mended(entry),
    !rules.length && !entry.cut && !Object.values(entry.changed ?? {}).some(Boolean) && make("p.note.soft", "This stage dropped nothing."),
  );
}

function rule(entry, name, amount) {
  const samples = amount.samples ?? [];
  const line = drawn(make("span.line"), () => {
    const all = has(entry.in) ? value(entry.in) : value(entry.out) + value(amount);
    const share = has(amount) && all ? value(amount) / all : 0;
    return [
      make("span.label", name, amount.kind && make("span.soft", ` (${amount.kind})`)),
      make("span.bar", { "--share": `${100 * share}%` }),
      make("span.number", figure(amount)), make("span.number.soft", has(amount) ? percent(value(amount), all) : ""),
    ];
  });
  const told = entry.stage === "near" ? samples.map((one) => ({ ...one, detail: `Jaccard ${one.detail}` })) : samples;
  return fold(line, told, amount.documents);
}

/** Damaged files, which were read only up to the damage. */
function damagedBlock() {
  const damaged = report.damaged ?? [];
  if (!damaged.length) return null;
  const files = damaged.length === 1 ? "1 file was" : `${whole.format(damaged.length)} files were`;
  return fold(told("damaged", `${files} read only up to the damage; the number of lost documents is unknown`), damaged.map((one) => (
    { id: one.name, detail: one.place, text: `${whole.format(one.documents)} documents were read before the damage.` })));
}

/** Files in the folders of a source that do not have the source's format. */
function leftOutBlock() {
  return Object.entries(report.left_out ?? {}).map(([source, suffixes]) => make("div.rule", told("left out",
    `files of other formats in ${source}: ${Object.entries(suffixes).map(([suffix, count]) => `${whole.format(count)} ${suffix}`).join(", ")}`)));
}

/** Characters that the charsets of the documents cannot decode. */
function replacedBlock() {
  const { replaced } = report.summary.words;
  return replaced ? make("div.rule", told("replaced", replaced)) : null;
}

const told = (label, text) => make("span.line", make("span.label", label), make("span.told.whole", text));

function cutBlock({ cut }) {
  return cut ? fold(told(cut.pieces === undefined ? "cut" : "short pieces", `${cut.words}; the documents are kept`), cut.samples ?? []) : null;
}

function mended(entry) {
  const changed = Object.entries(entry.changed ?? {}).filter(([, count]) => count);
  const samples = entry.changed_samples ?? [];
  if (!changed.length && !samples.length) return null;
  const sign = entry.mended < 0 ? "\u2212" : "+";
  const parts = [changed.map(([what, count]) => `${what} in ${whole.format(count)}`).join(", "),
    entry.mended && `${sign}${bytes(Math.abs(entry.mended))} of text`];
  return fold(told("repaired", parts.filter(Boolean).join("; ")), samples);
}

function fold(line, samples, documents) {
  if (!samples.length) return make("div.rule", line);
  const details = make("details.rule", make("summary", line),
    documents > samples.length && make("p.note.soft", `${samples.length} of ${whole.format(documents)}, chosen at random`),
    samples.map(sample));
  details.addEventListener("toggle", () => details.open && markDifferences(details));
  return details;
}
