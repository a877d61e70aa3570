// The flow chart: a river of documents that loses a stream at each stage. It runs to the right, or downwards on a
// phone.
"use strict";

const CHARACTER = 7.4; // mean width of a character in bold type, in pixels

/** An amount that is short enough for the chart. The list of stages below has all digits. */
const brief = (amount) => (unit() === "documents" ? count(value(amount)) : figure(amount));
const count = (number) => (number < 1e7 ? whole.format(number) : short(number));

/** The stations of the river in a unit: the amounts that enter, are dropped, and are left. */
function stations() {
  const flow = report.flow.filter((entry) => has(entry.out));
  if (!flow.length) return [];
  return flow.map((entry) => {
    const out = value(entry.out);
    const lost = Object.values(entry.rules).reduce((sum, amount) => sum + value(amount), 0)
      + (unit() === "documents" ? 0 : value(entry.cut));
    return { stage: entry.stage, entry, out, lost, into: has(entry.in) ? value(entry.in) : out + lost };
  });
}

function drawFlow(width) {
  const stops = stations();
  if (!stops.length) return make("p.note", "There are no figures in this unit.");
  const across = width / (stops.length + 1.15);
  const down = width < 720 || across < 10 + CHARACTER * Math.max(...stops.map((stop) => Math.max(...labels(stop).map((text) => text.length))));
  const all = Math.max(...stops.map((stop) => Math.max(stop.into, stop.out + stop.lost)), 1);
  const share = Math.max(...stops.map((stop) => stop.lost)) / all;
  const step = down ? 66 : across;
  const room = step - 22;
  const thick = Math.min(down ? 132 : 168, share ? room / share : Infinity);
  const scale = thick / all;
  const lead = down ? 46 : step * 0.55;
  const length = lead + stops.length * step + (down ? 58 : step * 0.6);
  const top = down ? 2 : 58; // position of the river's straight bank
  const foot = top + thick + (down ? 26 : 48); // end of the streams
  const at = (u, v) => (down ? `${v.toFixed(2)} ${u.toFixed(2)}` : `${u.toFixed(2)} ${v.toFixed(2)}`);

  const river = [];
  const streams = [];
  let u = lead;
  let thickness = Math.max(stops[0].into * scale, 1);
  const first = thickness;
  for (const stop of stops) {
    const lost = stop.lost * scale;
    const left = Math.max(stop.out * scale, 0.75);
    const kept = Math.max(thickness - lost, 0.5);
    if (stop.lost) streams.push(stream(at, u, top + kept, Math.max(lost, 1.4), foot, stop, down));
    river.push(`L ${at(u, top + thickness)} L ${at(u, top + kept)}`);
    // The change of the texts' size by repairs, between the stream and the next station.
    river.push(`C ${at(u + step * 0.5, top + kept)} ${at(u + step * 0.5, top + left)} ${at(u + step, top + left)}`);
    stop.u = u;
    thickness = left;
    u += step;
  }
  const point = Math.min(thickness / 2, 16);
  const bed = `M ${at(0, top)} L ${at(0, top + first)} ${river.join(" ")} L ${at(length - point, top + thickness)} `
    + `L ${at(length, top + thickness / 2)} L ${at(length - point, top)} Z`;
  const height = down ? length + 4 : foot + 44;
  const told = `Amounts that passed the stages, in ${unit()}`;
  return make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": told },
    make("defs", streams.map((one) => one.fade)),
    streams.map((one) => one.path),
    make("path.river", { d: bed }),
    ends(stops, { down, length, top, thickness, first }),
    stops.map((stop) => station(stop, { down, top, thick, foot, step })),
  );
}

/** A stream: a slice of the river's lower bank that turns away. It starts in the river's colour and fades out. */
function stream(at, u, v, lost, foot, stop, down) {
  const r = 9;
  const bend = v + lost + r;
  const d = `M ${at(u - 1.5, v)} Q ${at(u + r + lost, v)} ${at(u + r + lost, bend)} L ${at(u + r + lost, foot)} `
    + `L ${at(u + r, foot)} L ${at(u + r, bend)} Q ${at(u + r, v + lost)} ${at(u - 1.5, v + lost)} Z`;
  const [from, to] = [(v + lost).toFixed(1), foot];
  const along = down ? { x1: from, x2: to, y1: 0, y2: 0 } : { x1: 0, x2: 0, y1: from, y2: to };
  const id = `leaving-${stop.stage}`;
  return {
    path: make("path", { d, fill: `url(#${id})` }),
    fade: make("linearGradient", { id, gradientUnits: "userSpaceOnUse", ...along },
      make("stop.from", { offset: "0" }), make("stop.to", { offset: "0.5" }), make("stop.gone", { offset: "1" })),
  };
}

function words(x, y, kind, text, anchor) {
  return make(`text.${kind}`, { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, text);
}

function ends(stops, { down, length, top, thickness, first }) {
  const last = stops.at(-1);
  const { stage, in: found, out } = stops[0].entry;
  const came = brief(has(found) ? found : out);
  const word = stage === "ingest" && has(found) ? "found" : "read";
  const stayed = `${brief(last.entry.out)} kept`;
  if (down) {
    return [words(first + 14, 20, "name", `${came} ${word}`), words(Math.max(thickness, 20) + 14, length - 12, "name", stayed)];
  }
  const inside = thickness > 30;
  return [
    words(10, top + Math.min(first, 400) / 2 - 2, "inside", came), words(10, top + first / 2 + 15, "inside", word),
    inside && words(length - 20, top + thickness / 2 - 2, "inside", brief(last.entry.out), "end"),
    words(length - 20, inside ? top + thickness / 2 + 15 : top + thickness + 18, inside ? "inside" : "name", inside ? "kept" : stayed, "end"),
  ];
}

/** The lost amount of a stop. It is an estimate if one of its parts is. */
function loss({ entry, lost }) {
  return { [unit()]: lost, estimated: [...Object.values(entry.rules), entry.cut].some((one) => one?.estimated) };
}

/** Labels of a stop: its name, the amount that is left, the lost amount, and the share of the loss. */
function labels(stop) {
  const { places, pieces } = stop.entry.cut ?? {};
  const none = places ? `${count(places)} cut` : pieces ? `${count(pieces)} short` : "none";
  const lost = stop.lost ? brief(loss(stop)).replace(/^(\u2248\u2009)?/, "$1\u2212") : none;
  return [titleOf(stop.stage), `${brief(stop.entry.out)} ${verbs(stop.entry)[2]}`, lost, stop.lost ? percent(stop.lost, stop.into) : ""];
}

function station(stop, { down, top, thick, foot, step }) {
  const [name, after, lost, share] = labels(stop);
  const went = figure(loss(stop));
  const [came, dropped, left] = verbs(stop.entry);
  const gone = stop.lost ? `${went} ${dropped} (${share})` : `none ${dropped}`;
  const told = `${name}: ${figure(stop.entry.in)} ${came}, ${gone}, ${figure(stop.entry.out)} ${left}`;
  const texts = down
    ? [words(foot + 10, stop.u + 12, "name", name),
      words(foot + 10, stop.u + 30, stop.lost ? "lost" : "soft", share ? `${lost}  (${share})` : lost)]
    : [words(stop.u, 20, "name", name), words(stop.u, 38, "soft", after),
      words(stop.u, foot + 17, stop.lost ? "lost" : "soft", lost), words(stop.u, foot + 34, "soft", share)];
  const box = down
    ? { x: 0, y: stop.u - 8, width: "100%", height: 56 }
    : { x: stop.u - 8, y: 0, width: step - 4, height: foot + 42 };
  const line = down ? { x1: 0, x2: foot + 4, y1: stop.u, y2: stop.u } : { x1: stop.u, x2: stop.u, y1: 46, y2: top - 4 };
  return make("svg:a", { href: `#stage-${stop.stage}`, "aria-label": told },
    make("title", told), make("rect.target", { ...box, rx: 8 }), !down && make("line.tick", line), texts);
}
