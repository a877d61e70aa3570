// Tokens on the page: the tint shows how surprising a token is, and a card lists the likeliest alternatives.

const BITS = 10; // bits of surprise at which a token has the full tint: a probability of one in a thousand

const card = document.getElementById("card");
const told = new WeakMap();
let chosen = null;

/** Shows the tokens of one answer. Bytes of an incomplete character wait for the token that completes the character. */
export class Writer {
  constructor(place) {
    this.place = place;
    this.decoder = new TextDecoder();
    this.bits = 0;
    this.count = 0;
  }

  write(token) {
    const text = this.decoder.decode(token.bytes, { stream: true });
    const word = text.trimStart() || text; // a space before a word is not tinted
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = word;
    const bits = -token.logprob / Math.LN2;
    span.style.setProperty("--surprise", Math.min(1, bits / BITS).toFixed(3));
    told.set(span, token);
    this.place.append(text.slice(0, text.length - word.length), span);
    this.bits += bits;
    this.count += 1;
  }
}

const spell = new TextDecoder();

/** Text of a token, with invisible characters made visible. */
function visible(bytes) {
  const text = spell.decode(bytes);
  if (text.includes("\ufffd")) return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return text.replaceAll(" ", "\u2423").replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5") || "\u2205";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share >= 99.95) return "100%";
  return share >= 0.1 ? `${share.toFixed(1)}%` : share >= 0.001 ? `${share.toFixed(3)}%` : "< 0.001%";
}

function same(a, b) {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}

function line(entry, written) {
  const item = document.createElement("li");
  const name = document.createElement("code");
  name.textContent = visible(entry.bytes);
  item.append(name, percent(entry.logprob));
  item.className = written ? "written" : "";
  item.style.setProperty("--share", `${100 * Math.exp(entry.logprob)}%`);
  return item;
}

export function show(span) {
  chosen?.classList.remove("chosen");
  chosen = span;
  const token = told.get(span);
  card.hidden = !token;
  if (!token) return;
  span.classList.add("chosen");

  const head = document.createElement("p");
  const name = document.createElement("code");
  const share = document.createElement("strong");
  name.textContent = visible(token.bytes);
  share.textContent = percent(token.logprob);
  head.append(name, share);

  const list = document.createElement("ol");
  list.append(...token.alternatives.map((one) => line(one, same(one.bytes, token.bytes))));
  if (!token.alternatives.some((one) => same(one.bytes, token.bytes))) {
    const gap = document.createElement("li");
    gap.className = "gap";
    gap.textContent = "\u22ef";
    list.append(gap, line(token, true));
  }
  card.replaceChildren(head, list);
  place(span);
}

/** Place the card below the token if there is room, and above the token otherwise. */
function place(span) {
  const { left, top, bottom } = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const below = bottom + 8 + height < innerHeight;
  card.style.left = `${Math.max(8, Math.min(left - 12, innerWidth - width - 8))}px`;
  card.style.top = `${below ? bottom + 8 : Math.max(8, top - height - 8)}px`;
}

export function hide() {
  show(null);
}

/** Pointing at a token or tapping on it selects the token. A tap elsewhere, the escape key and scrolling deselect it. */
export function watch(sheet) {
  sheet.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse") show(event.target.closest(".token"));
  });
  sheet.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hide();
  });
  sheet.addEventListener("scroll", hide, { passive: true });
  document.addEventListener("click", (event) => {
    if (!card.contains(event.target)) show(event.target.closest(".token"));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!chosen || document.activeElement.matches("textarea, input")) return;
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const token = next && chosen[next];
    if (token?.matches(".token")) {
      event.preventDefault();
      token.scrollIntoView({ block: "nearest" });
      show(token);
    }
  });
}
