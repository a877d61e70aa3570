<<<<<<< HEAD
// The sections of the page; each gives nothing where the report has nothing to say.
=======
// The first screen, and what went at each stage, with samples.
>>>>>>> audit
"use strict";

function section(id, title, ...content) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), content);
}

const ratio = (share, digits = 1) => percent(share, 1, digits);

// What one wants to know first

function answers() {
  const { read: came, kept } = report.summary ?? {};
  const cards = [];
  if (came && kept) {
    cards.push(card("What stays", percent(value(kept), value(came)),
      `${figure(kept)} of ${figure(came)}${unit() === "bytes" ? "" : ` ${unit()}`}`, "#losses"));
  }
  const planted = report.duplicates?.planted;
  if (planted?.planted) {
    cards.push(card("Duplicates found", ratio(planted.recall, 2),
      `${whole.format(planted.found)} of ${whole.format(planted.planted)} near-duplicates planted into this corpus`
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
  if (report.rejects !== undefined) {
<<<<<<< HEAD
    cards.push(card("Unreadable", whole.format(report.rejects), `${report.rejects === 1 ? "record was" : "records were"} set aside with file, place and reason`, "#stage-ingest"));
=======
    const were = report.rejects === 1 ? "record was" : "records were";
    cards.push(card("Unreadable", whole.format(report.rejects), `${were} set aside with file, place and reason`, "#stage-ingest"));
>>>>>>> audit
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

// What went, and why

function losses() {
  const place = make("div");
  place.append(...report.flow.map(stageBlock));
  return section("losses", "What went, and why", search(place), place);
}

function stageBlock(entry) {
  const rules = Object.entries(entry.rules);
  const amounts = drawn(make("p.amounts"), () => {
    const came = has(entry.in) ? figure(entry.in) : null;
    return [came && `${came} in, `, make("strong", figure(entry.out)), ` ${came ? "left" : "read"}`];
  });
  return make("article.stage", { id: `stage-${entry.stage}` },
    make("header", make("h3", titleOf(entry.stage)), amounts),
    STAGES[entry.stage] && make("p.note", STAGES[entry.stage][1]),
    rules.map(([name, amount]) => rule(entry, name, amount)),
    cutBlock(entry), mended(entry),
    !rules.length && !entry.cut && !Object.values(entry.changed ?? {}).some(Boolean) && make("p.note.soft", "Nothing went here."),
  );
}

function rule(entry, name, amount) {
  const samples = amount.samples ?? [];
  const line = drawn(make("span.line"), () => {
    const all = has(entry.in) ? value(entry.in) : value(entry.out) + value(amount);
    const share = has(amount) && all ? value(amount) / all : 0;
    return [
      make("span.label", name),
      make("span.bar", { "--share": `${100 * share}%` }),
      make("span.number", figure(amount)), make("span.number.soft", has(amount) ? percent(value(amount), all) : ""),
    ];
  });
  const told = entry.stage === "near" ? samples.map((one) => ({ ...one, detail: `Jaccard ${one.detail}` })) : samples;
  return fold(line, told, amount.documents);
}

function cutBlock({ cut }) {
  if (!cut) return null;
  if (cut.pieces !== undefined) {
    return make("div.rule", make("span.line", make("span.label", "short pieces"),
      make("span.told", `${whole.format(cut.pieces)} pieces between cuts were too short to keep; ${bytes(cut.bytes)} in all`)));
  }
  return make("div.rule", make("span.line", make("span.label", "cut"), make("span.told",
    `${whole.format(cut.places)} passages of ${whole.format(cut.documents)} documents, ${bytes(cut.bytes)}; the documents stay`)));
}

function mended(entry) {
  const changed = Object.entries(entry.changed ?? {}).filter(([, count]) => count);
  const samples = entry.changed_samples ?? [];
  if (!changed.length && !samples.length) return null;
  const told = changed.map(([what, count]) => `${what} in ${whole.format(count)}`).join(", ");
  const sign = entry.mended < 0 ? "\u2212" : "+";
  const line = make("span.line", make("span.label", "mended"),
    make("span.told", told, entry.mended ? `${told ? "; " : ""}${sign}${bytes(Math.abs(entry.mended))} of text` : ""));
  return fold(line, samples);
}

function fold(line, samples, documents) {
  if (!samples.length) return make("div.rule", line);
  const details = make("details.rule", make("summary", line),
    documents > samples.length && make("p.note.soft", `${samples.length} of ${whole.format(documents)}, chosen by chance`),
    samples.map(sample));
  details.addEventListener("toggle", () => details.open && markDifferences(details));
  return details;
}
<<<<<<< HEAD

// Duplicates

function duplicates() {
  const found = report.duplicates;
  if (!found) return null;
  return section("duplicates", "Can the deduplication be trusted?",
    make("p.note", `Asked for: pairs of Jaccard similarity ${found.jaccard} and above, at least ${ratio(found.recall)} of those at `
      + `exactly ${found.jaccard} found, counted in ${found.ngram}-grams of words. `,
    found.candidates !== null && `${whole.format(found.candidates)} candidate pairs came up; each was checked exactly before anything was removed.`),
    make("div.columns", plantedBlock(found), pairsBlock(found), sizesBlock(found)), clustersBlock(found));
}

function plantedBlock({ planted, jaccard }) {
  if (!planted?.tenths) return null;
  const range = (one) => `${one.from.toFixed(1)} to ${(one.from + 0.1).toFixed(1)}`;
  const below = planted.tenths.filter((one) => one.from + 0.1 <= jaccard + 1e-9);
  const number = (name) => below.reduce((sum, one) => sum + one[name], 0);
  return make("div", make("h3", "Recall, measured"),
    make("p.note", `Documents of this corpus were copied, changed and searched for; ${whole.format(planted.sample)} took part.`),
    make("ul.recalls", planted.tenths.filter((one) => !below.includes(one)).map((one) => make("li", { "--share": `${(100 * one.found) / Math.max(one.planted, 1)}%` },
      make("span.label", range(one)), make("span.bar"), make("span.number", percent(one.found, one.planted)),
      make("span.number.soft", `${whole.format(one.found)} of ${whole.format(one.planted)}`)))),
    make("p", planted.precision !== null && ["Precision ", make("strong", ratio(planted.precision, 2)), ` of the ${whole.format(planted.pairs_found)} pairs it found. `],
      below.length > 0 && `Of ${whole.format(number("planted"))} planted below ${below.at(-1).from + 0.1 > jaccard - 1e-9 ? jaccard : (below.at(-1).from + 0.1).toFixed(1)}, ${number("found") || "none"} ${number("found") === 1 ? "was" : "were"} taken for duplicates.`));
}

function pairsBlock({ pairs, jaccard }) {
  if (!pairs?.length) return null;
  const columns = filled(pairs.map((one) => ({ from: one.from, count: one.pairs })), nextScore);
  const found = columns.filter((one) => one.from >= jaccard - 1e-9).reduce((sum, one) => sum + (one.count ?? 0), 0);
  return make("div", make("h3", "Pairs by similarity"),
    make("p.note", `${whole.format(found)} pairs at ${jaccard} and above count as duplicates; below it stand candidates that the exact check refused.`),
    histogram(columns, { cut: jaccard - 1e-9, name: "Pairs by Jaccard similarity", every: 2, edge: hundredths, axis: "Jaccard similarity",
      count: (one) => one.count ?? 0, spelled: (one) => `${whole.format(one.count ?? 0)} pairs` }));
}

const hundredths = (from) => from.toFixed(2).replace(/^0(?=\.)/, "");

function sizesBlock({ sizes }) {
  if (!sizes?.length) return null;
  return make("div", make("h3", "Clusters by size"), make("p.note", "Of each, one document stays."),
    table("Clusters of near-duplicates by size", ["Documents", "#Clusters", "#Removed"],
      sizes.map((one) => [one.from === one.to ? String(one.from) : `${whole.format(one.from)} to ${whole.format(one.to)}`, whole.format(one.clusters), whole.format(one.removed)])));
}

function clustersBlock({ clusters }) {
  if (!clusters?.length) return null;
  return [make("h3", "Largest clusters"), firsts(clusters, ({ size, documents }) => make("details.rule", make("summary", make("span.line",
    make("span.label", `${whole.format(size)} documents`), make("span.told", head(documents[0].text)))),
  documents.map((one, i) => sample({ ...one, detail: i ? "" : "stays" })),
  size > documents.length && make("p.note.soft", `and ${whole.format(size - documents.length)} more`)))];
}

/** The first of many, the rest behind a fold. */
function firsts(many, draw, shown = 6) {
  const all = many.map(draw);
  return all.length <= shown + 1 ? all
    : [all.slice(0, shown), make("details", make("summary.plain", `${all.length - shown} more`), all.slice(shown))];
}

const head = (text) => text.slice(0, 200).replace(/\s+/g, " ");

// Test data

function leakage() {
  const found = report.leakage;
  if (!found?.sets?.length) return null;
  const done = {
    passage: `Passages were cut out with ${found.margin} characters on both sides; a document that would have been cut in more than ${found.max_cuts} places was dropped.`,
    document: "Documents that hold any were dropped.",
    report: "They were counted and left where they are, as asked.",
  }[found.action];
  const all = (one, name) => (one[name] === undefined ? "\u2013" : whole.format(one[name]));
  return section("leakage", "Did test data leak in?",
    make("p.note", `What test sets and corpus had in common: ${found.ngram}-grams of words, each confirmed by its words. ${done ?? ""}`),
    table("Overlap with each test set", ["Test set", `#${found.ngram}-grams`, "#in the corpus", "#share", "#items", "#touched", "#half found", "#passages", "#in documents"],
      found.sets.map((one) => [one.name, all(one, "grams"), all(one, "grams_found"), one.grams_found ? percent(one.grams_found, one.grams, 2) : "0",
        all(one, "items"), all(one, "items_touched"), all(one, "items_half_found"), all(one, "passages"), all(one, "documents_touched")])),
    passagesBlock(found), frequentBlock(found));
}

function passagesBlock({ passages, ngram }) {
  if (!passages?.length) return null;
  return [make("h3", "Longest passages"), firsts(passages, (one) => make("details.rule", make("summary", make("span.line",
    make("span.label", `${one.set}, ${whole.format(one.item)}`), make("span.told", head(one.passage)), make("span.number", `${whole.format(one.grams + ngram - 1)} words`))),
  sample({ id: one.document, detail: `item ${whole.format(one.item)} of ${one.set}`, text: one.passage })))];
}

function frequentBlock({ frequent, ngram }) {
  if (!frequent?.length) return null;
  return make("details.rule", make("summary", make("span.line", make("span.label", `Most frequent ${ngram}-grams`),
    make("span.told", "what many documents have did not leak; it is what people write alike"))),
  table(`Most frequent ${ngram}-grams`, ["Words", "Test sets", "#Documents"],
    frequent.map((one) => [one.gram, one.test_sets.join(", "), whole.format(one.documents)])));
}

// Languages and lengths

function texts() {
  const { languages, scores, lengths, settings } = report;
  const keep = settings?.language?.keep ?? [];
  const block = (title, note, draw) => make("div", make("h3", title), note && make("p.note", note), drawn(make("div"), draw));
  const blocks = [
    lengths?.length && block("Tokens of a document", settings?.length?.min_tokens ? `Those under ${settings.length.min_tokens} went.` : "",
      () => histogram(filled(lengths, nextLength), { name: "Documents by tokens", cut: settings?.length?.min_tokens, every: 2,
        edge: (from) => (from < 1024 ? String(from) : `${+(from / 1024).toFixed(1)}k`), axis: "tokens" })),
    languages?.length && block("Languages", keep.length ? `Kept: ${keep.join(", ")}.` : "",
      () => bars(languages, { gone: (one) => keep.length > 0 && !keep.includes(one.name), label: (one) => languageName(one.name) })),
    scores?.length && block("Certainty of the language", `By ${settings?.language?.detector ?? "the detector"}.`,
      () => histogram(filled(scores, nextScore), { name: "Documents by the detector's score", cut: settings?.language?.min_score, every: 4,
        edge: hundredths, axis: "score" })),
  ].filter(Boolean);
  return blocks.length ? section("texts", "Lengths and languages", make("div.columns", blocks)) : null;
}

const spelled = new Intl.DisplayNames("en", { type: "language", fallback: "none" });

function languageName(code) {
  if (code === "und") return "none found";
  try {
    const name = spelled.of(code);
    return name ? `${name} (${code})` : code;
  } catch {
    return code;
  }
}

// Sources, settings, time

function sources() {
  if (!report.sources?.length) return null;
  const isWritten = report.sources.some((one) => one.train);
  const place = drawn(make("div"), () => {
    const total = (name) => report.sources.reduce((sum, one) => sum + (one.train?.[name] ?? 0), 0);
    return table("Sources", ["Source", "#Read", "#Kept", "#of it", "#Weight", ...(isWritten ? ["#Documents to train on", "#Tokens", "#of all"] : [])],
      report.sources.map((one) => [one.name, figure(one.read), figure(one.kept), percent(value(one.kept), value(one.read)), String(one.weight),
        ...(isWritten ? [whole.format(one.train?.documents ?? 0), short(one.train?.tokens ?? 0), percent(one.train?.tokens ?? 0, total("tokens"))] : [])]));
  });
  return section("sources", "Sources", place, written());
}

function written() {
  const made = report.written ?? [];
  return made.length > 0 && [make("h3", "Token shards"), table("Token shards", ["Shard", "#Documents", "#Tokens"],
    made.map((one) => [one.name, one.documents === undefined ? "\u2013" : whole.format(one.documents), whole.format(one.tokens)]))];
}

const seconds = (value) => value.toFixed(value < 10 ? 2 : 0);

function run() {
  const rows = Object.entries(report.settings ?? {}).flatMap(([name, setting]) => (
    setting && typeof setting === "object" && !Array.isArray(setting)
      ? Object.entries(setting).map(([key, one]) => [make("code", `${name}.${key}`), make("code", JSON.stringify(one))])
      : name === "sources" ? setting.flatMap((source) => Object.entries(source).map(([key, one]) => [make("code", `sources.${source.name}.${key}`), make("code", JSON.stringify(one))]))
        : [[make("code", name), make("code", JSON.stringify(setting))]]));
  const stages = timings?.stages ?? [];
  return section("run", "Time and settings",
    stages.length > 0 && table("Time of each stage", ["Stage", "#MB", "#Seconds", "#MB/s a core", "#Tasks", "#done in this run", "#in seconds"],
      stages.map((one) => [one.name, (one.bytes / 1e6).toFixed(1), seconds(one.seconds), one.bytes >= 1e5 && one.seconds ? (one.bytes / 1e6 / one.seconds).toFixed(1) : "\u2013",
        whole.format(one.tasks), whole.format(one.run), one.run ? seconds(one.elapsed) : "\u2013"])),
    timings && make("p.note", [
      stages.length > 0 && "Seconds are those of all processes added up, in this run or an earlier one. ", timings.machine && `${timings.machine}. `,
      timings.versions && Object.entries(timings.versions).map(([name, version]) => `${name} ${version}`).join(", "),
    ]),
    rows.length > 0 && make("details.rule", make("summary", make("span.line", make("span.label", "Settings"), make("span.told", `${rows.length} values, enough to make this corpus again`))),
      table("Settings", ["Setting", "Value"], rows)));
}
=======
>>>>>>> audit
