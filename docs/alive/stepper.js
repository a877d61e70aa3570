// Steps of a figure: buttons, keys, and a play button that takes a step at a time.
"use strict";

const SECONDS = 2.6;  // of a step while the figure plays
const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/**
 * Steps of the figure `name`. `show(step, moves)` draws a step; `moves` says whether its numbers move to their places.
 * `keys` has functions for other keys. Returns a function that starts again with another number of steps.
 */
function stepper(name, show, keys = {}) {
  let step = 0, count = 0, timer = 0;
  const back = make("button", { type: "button", click: () => go(step - 1) }, "Back");
  const play = make("button", { type: "button", click: toggle }, "Play");
  const next = make("button", { type: "button", click: () => go(step + 1) }, "Next");
  const place = make("output");
  const others = keys.ArrowUp ? " · ↑ ↓ another number" : "";
  at(`${name}-steps`).append(back, play, next, place, make("span.keys", `Keys: ← → step${others} · space plays`));

  function draw(moves) {
    say(place, `Step ${step + 1} of ${count}`);
    back.disabled = step === 0;
    next.disabled = step === count - 1;
    show(step, moves && !isStill());
  }
  function stop() {
    clearInterval(timer);
    timer = 0;
    say(play, "Play");
  }
  function go(to) {
    if (to < 0 || to >= count) return;
    stop();
    const forward = to > step;
    step = to;
    draw(forward);
  }
  function toggle() {
    if (timer) return stop();
    say(play, "Stop");
    if (step === count - 1) step = -1;
    const tick = () => {
      step += 1;
      draw(true);
      if (step === count - 1) stop();
    };
    timer = setInterval(tick, SECONDS * 1000);
    tick();
  }
  const pressed = { ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1), " ": toggle, ...keys };
  for (const place of [at(`${name}-stage`), at(`${name}-steps`)]) {
    place.addEventListener("keydown", (event) => {
      const isOfButton = event.key === " " && event.target !== at(`${name}-stage`);  // the key presses the button
      if (!pressed[event.key] || isOfButton || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      pressed[event.key]();
    });
  }
  return (steps) => {
    stop();
    [step, count] = [0, steps];
    draw(false);
  };
}
