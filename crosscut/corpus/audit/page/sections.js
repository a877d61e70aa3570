// The sections of the page; each gives nothing where the report has nothing to say.
"use strict";

function section(id, title, ...content) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), content);
}

const ratio = (share, digits = 1) => percent(share, 1, digits);

// What one wants to know first

function answers() {
  const { read: came, kept } = report.summary;
  const cards = [];
  if (came && kept) {
    cards.push(card("stays", percent(value(kept), value(came)),
      `${figure(kept)} of ${figure(came)} ${unit()} stay`, "#losses"));
  }
  const planted = report.duplicates?.planted;
  if (planted?.planted) {
    cards.push(card("duplicates found", ratio(planted.recall, 2),
      `${whole.format(planted.found)} of ${whole.format(planted.planted)} near-duplicates planted into this corpus`
        + (planted.precision === undefined ? "" : `; ${ratio(planted.precision, 2)} of what was removed is one`), "#duplicates"));
  }
  const sets = report.leakage?.sets ?? [];
  if (sets.length) {
    const worst = sets.reduce((most, one) => (one.share > most.share ? one : most));
    cards.push(card("test data", worst.found ? ratio(worst.share, 2) : "none",
      worst.found
        ? `of the ${report.leakage.ngram}-grams of ${worst.name} occur in the corpus${sets.length > 1 ? ", the most of any test set" : ""}`
        : `of the ${report.leakage.ngram}-grams of ${sets.map((one) => one.name).join(", ")} occur in the corpus`, "#leakage"));
  }
  const rejected = Object.values(report.flow.find((entry) => entry.stage === "ingest")?.rules ?? {})
    .reduce((sum, amount) => sum + amount.documents, 0);
  if (report.flow.some((entry) => entry.stage === "ingest")) {
    cards.push(card("unreadable", whole.format(rejected), rejected === 1 ? "record was set aside" : "records were set aside", "#stage-ingest"));
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
    mended(entry),
    !rules.length && !entry.changed && make("p.note.soft", "Nothing went here."),
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
  return fold(line, samples, amount.documents);
}

function mended(entry) {
  const changed = Object.entries(entry.changed ?? {});
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

// Duplicates

function duplicates() {
  const found = report.duplicates;
  if (!found) return null;
  return section("duplicates", "Can the deduplication be trusted?",
    found.jaccard !== undefined && make("p.note", `Asked for: pairs of Jaccard similarity ${found.jaccard} and above, at least `
      + `${ratio(found.recall)} of those at exactly ${found.jaccard} found. Similarity is that of their ${found.ngram}-grams of words; `
      + "every candidate pair was checked by it before anything was removed."),
    make("div.columns", plantedBlock(found), pairsBlock(found), sizesBlock(found)), clustersBlock(found));
}

function plantedBlock({ planted, jaccard }) {
  if (!planted?.planted) return null;
  return make("div", make("h3", "Planted duplicates"),
    make("p.note", `Copies of ${whole.format(planted.planted)} documents of this corpus with changes, at known similarities, `
      + "went through the same search."),
    make("ol.recalls", planted.buckets.map((one) => make(one.from < jaccard - 1e-9 ? "li.below" : "li", { "--share": `${100 * one.found / Math.max(one.planted, 1)}%` },
      make("span.label", `${one.from.toFixed(2)} to ${one.to.toFixed(2)}`), make("span.bar"),
      make("span.number", percent(one.found, one.planted)), make("span.number.soft", `${whole.format(one.found)} of ${whole.format(one.planted)}`)))),
    planted.precision !== undefined && make("p", "Precision ", make("strong", ratio(planted.precision, 2)), ": "
      + "the share of removed documents that have a similarity above the threshold with one that stays, or a chain of such pairs."));
}

function pairsBlock({ pairs }) {
  if (!pairs?.length) return null;
  const columns = pairs.map((one) => ({ ...one, documents: one.pairs, bytes: undefined }));
  const largest = Math.max(...columns.map((one) => one.pairs), 1);
  return make("div", make("h3", "Pairs by similarity"),
    make("p.note", `${whole.format(columns.reduce((sum, one) => sum + one.pairs, 0))} pairs of near-duplicates.`),
    make("figure.histogram", make("ol", { "aria-label": "Pairs by Jaccard similarity" }, columns.map((one) => make("li",
      { "--share": `${(100 * one.pairs) / largest}%`, tabindex: "0", title: `${one.from.toFixed(2)} to ${one.to.toFixed(2)}: ${whole.format(one.pairs)} pairs`,
        "aria-label": `${one.from.toFixed(2)} to ${one.to.toFixed(2)}: ${whole.format(one.pairs)} pairs` },
      make("span.bar"), make("span.edge", { "aria-hidden": "true" }, one.from.toFixed(2).replace("0.", "."))))),
    make("figcaption", "Jaccard similarity")));
}

function sizesBlock({ sizes }) {
  if (!sizes?.length) return null;
  return make("div", make("h3", "Clusters by size"),
    table("Clusters of near-duplicates by size", ["#Documents", "#Clusters", "#Removed"],
      sizes.map((one) => [one.range ?? whole.format(one.size), whole.format(one.clusters), whole.format(one.removed)])));
}

function clustersBlock({ clusters }) {
  if (!clusters?.length) return null;
  return [make("h3", "Largest clusters"), clusters.map((cluster) => {
    const details = make("details.rule", make("summary", make("span.line",
      make("span.label", `${whole.format(cluster.size)} documents`), make("span.told", (cluster.documents[0]?.text ?? "").slice(0, 140)))),
    cluster.documents.map((one, i) => sample({ ...one, detail: i ? one.detail : "stays" })),
    cluster.size > cluster.documents.length && make("p.note.soft", `and ${whole.format(cluster.size - cluster.documents.length)} more`));
    return details;
  })];
}

// Test data

function leakage() {
  const found = report.leakage;
  if (!found?.sets?.length) return null;
  const done = {
    passage: `Passages were cut out with ${found.margin} characters on both sides; a document that would have been cut in more than ${found.max_cuts} places was dropped.`,
    document: "Documents that hold any were dropped.",
    report: "They were counted and left where they are, as asked.",
  }[found.action];
  return section("leakage", "Did test data leak in?",
    make("p.note", `What test sets and corpus have in common: ${found.ngram}-grams of words, each confirmed exactly. ${done ?? ""}`),
    table("Overlap with each test set", ["Test set", `#${found.ngram}-grams`, "#In the corpus", "#Share", "#Items touched", "#Documents touched"],
      found.sets.map((one) => [one.name, whole.format(one.grams), whole.format(one.found), one.found ? ratio(one.share, 2) : "0",
        one.items === undefined ? "\u2013" : `${whole.format(one.items_touched)} of ${whole.format(one.items)}`,
        one.documents === undefined ? "\u2013" : whole.format(one.documents)])),
    found.passages?.length > 0 && [make("h3", "Longest passages"), found.passages.map((one) => {
      const line = make("span.line", make("span.label", one.set), make("span.told", one.text.slice(one.start ?? 0, (one.end ?? 0) || 140).slice(0, 160)),
        make("span.number", `${whole.format(one.words)} words`));
      return make("details.rule", make("summary", line), sample({ ...one, detail: one.item ? `also ${one.item}` : "" }));
    })]);
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
        edge: (from) => from.toFixed(2).replace(/^0(?=\.)/, ""), axis: "score" })),
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
  const place = drawn(make("div"), () => {
    const weighted = report.sources.some((one) => one.weight !== 1);
    const total = report.sources.reduce((sum, one) => sum + value(one.kept) * (one.weight ?? 1), 0);
    return table("Sources", ["Source", "#Read", "#Kept", "#Share kept", "#Weight", weighted ? "#Share, weighted" : "#Share"],
      report.sources.map((one) => [one.name, figure(one.read), figure(one.kept), percent(value(one.kept), value(one.read)),
        String(one.weight ?? 1), percent(value(one.kept) * (one.weight ?? 1), total)]));
  });
  return section("sources", "Sources", place, written());
}

function written() {
  const made = report.written ?? [];
  return made.length > 0 && [make("h3", "Token shards"), table("Token shards", ["Shard", "#Documents", "#Tokens"],
    made.map((one) => [one.name, one.documents === undefined ? "\u2013" : whole.format(one.documents), whole.format(one.tokens)]))];
}

function run() {
  const rows = Object.entries(report.settings ?? {}).flatMap(([name, setting]) => (
    setting && typeof setting === "object" && !Array.isArray(setting)
      ? Object.entries(setting).map(([key, one]) => [make("code", `${name}.${key}`), make("code", JSON.stringify(one))])
      : name === "sources" ? setting.flatMap((source) => Object.entries(source).map(([key, one]) => [make("code", `sources.${source.name}.${key}`), make("code", JSON.stringify(one))]))
        : [[make("code", name), make("code", JSON.stringify(setting))]]));
  const stages = timings?.stages ?? [];
  return section("run", "Time and settings",
    stages.length > 0 && table("Time of each stage", ["Stage", "#Seconds", "#MB/s", "#Tasks", "#Done in this run"],
      stages.map((one) => [one.stage, one.seconds.toFixed(one.seconds < 10 ? 2 : 0), one.mb_per_second ? one.mb_per_second.toFixed(1) : "\u2013", whole.format(one.tasks), whole.format(one.run)])),
    timings && make("p.note", [
      stages.length > 0 && "Seconds are those of all processes together. ", timings.machine && `${timings.machine}. `,
      timings.versions && Object.entries(timings.versions).map(([name, version]) => `${name} ${version}`).join(", "),
    ]),
    rows.length > 0 && make("details.rule", make("summary", make("span.line", make("span.label", "Settings"), make("span.told", `${rows.length} values, enough to make this corpus again`))),
      table("Settings", ["Setting", "Value"], rows)));
}
