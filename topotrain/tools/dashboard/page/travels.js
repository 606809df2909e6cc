// Lecture mode: messages of a slowed job as dots on their connections, each with the sentence that explains it.

import { byId, clearedContext, drawTag, lessMotion, readPalette, setText } from "./elements.js";
import { lastBefore } from "./job_view.js";
import { alongCurve } from "./map_layout.js";

const INTRODUCTIONS = [
  [/all-?reduce/i, "AllReduce: every unit adds up one part of the gradients for all workers, and all go on with the same mean."],
  [/hogwild/i, "Hogwild: worker groups change their values at the same time, without locks, and exchange changes while they train."],
  [/downpour/i, "Downpour: each worker group pushes gradients and fetches values at its own pace, and waits for no other group."],
  [/sandblaster/i, "Sandblaster: all workers push gradients to servers, which add them up and make one step for all."],
  [/island|outer|diloco/i, "Worker groups train alone for a while; then the servers step with what all of them have learned."],
];

/** What a message is called; of the others the server of the page says the sentence, or their own word is shown. */
const NAMES = {
  push: "gradient", gradient: "gradient", sum: "sum of gradients", partial: "partial sum", mean: "mean gradient",
  edit: "changed gradient", values: "values", difference: "changes", master: "values", offer: "values", reply: "changes",
  commit: "end of the step", vote: "all parts are here", apply: "decision", applied: "step is made", missed: "missed step",
};
const DATA = new Set(["push", "gradient", "sum", "partial", "mean", "edit", "values", "difference", "master", "offer", "reply"]);
const GRADIENTS = new Set(["push", "gradient", "sum", "partial", "mean", "edit"]);

/** Messages of one sender about one part of one step within these seconds are one moment. */
const TOGETHER_S = 0.25;
const TRAVEL_MS = 1100;
const STAY_MS = 2600;
/** With more moments in waiting than these, playing goes faster, so that it keeps up with the job. */
const PATIENCE = 6;
/** While the replay plays, a message is seen for so many seconds of the job. */
const TRAIL_S = 0.8;

/** Travels that belong together, in order: {at, what, step, bucket, from, to: [names]}. */
export function moments(travels) {
  const found = [];
  for (const [at, from, to, what, step, bucket] of travels) {
    const last = found.at(-1);
    const same = last && last.from === from && last.what === what && last.step === step && last.bucket === bucket;
    if (same && at - last.at < TOGETHER_S && !last.to.includes(to)) last.to.push(to);
    else found.push({ at, from, to: [to], what, step, bucket });
  }
  return found;
}

function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

/** The sentence of a moment. `templates` has one for each word, with {who}, {to}, {part}, {step} and {what}. */
export function sentenceOf(moment, templates) {
  const part = moment.bucket < 0 ? "all its slices" : `slice ${moment.bucket}`;
  const values = { who: moment.from, to: listed(moment.to), step: moment.step, part, what: moment.what };
  const name = NAMES[moment.what] ?? moment.what;
  const of = DATA.has(moment.what) ? ` of ${part}` : "";
  const verb = GRADIENTS.has(moment.what) && moment.what !== "mean" ? "pushes its" : "sends its";
  const plain = `{who} ${verb} ${name}${of} to {to}, step {step}.`;
  const template = templates?.[moment.what] ?? plain;
  return template.replace(/\{(\w+)\}/g, (whole, key) => (key in values ? String(values[key]) : whole));
}

/** The panel of the lecture, and the dots on the map. */
export class Lecture {
  constructor(map, onMoment) {
    this._map = map;
    this._onMoment = onMoment;
    this._moments = [];
    this._count = 0;
    this._index = -1;
    this._open = null;
    this._palette = readPalette();
    this._switch = byId("lecture-switch");
    this._switch.addEventListener("click", () => this._setOpen(!this._open));
    byId("lecture-next").addEventListener("click", () => this._step(1));
    byId("lecture-back").addEventListener("click", () => this._step(-1));
    byId("lecture-play").addEventListener("click", () => this._setPlaying(!this._playing));
  }

  /** Whether the lecture is shown. */
  get open() {
    return this._open === true;
  }

  /** Take a job's travels. */
  update(view) {
    this._view = view;
    if (view.travels.length === this._count) return;
    this._count = view.travels.length;
    const here = this._moments[this._index];
    this._moments = moments(view.travels);
    if (here) this._index = Math.max(0, lastBefore(this._moments.map((one) => [one.at]), here.at));
    this._switch.hidden = this._moments.length === 0;
    if (this._open === null && this._moments.length) this._setOpen(true);
    this._counted();
  }

  /** Show what travels at a moment of the replay, while the lecture itself does not play. */
  setMoment(t) {
    if (this._shown && Math.abs(this._shown.moment.at - t) > 0.01) this._shown = null;
    if (this._shown || !this._map.geometry) return;
    const { travels } = this._view;
    const last = lastBefore(travels, t);
    const found = [];
    for (let index = last; index >= 0 && t - travels[index][0] < TRAIL_S; index -= 1) {
      const [at, from, to, what] = travels[index];
      found.push({ from, to, what, share: (t - at) / TRAIL_S, tag: null });
    }
    if (found.length || this._dotted) this._draw(found);
  }

  /** Read the colours again. */
  recolour() {
    this._palette = readPalette();
  }

  _setOpen(open) {
    this._open = open;
    byId("lecture").hidden = !open;
    this._switch.setAttribute("aria-pressed", String(open));
    document.body.classList.toggle("lecturing", open);
    setText(byId("lecture-intro"), this._introduction());
    if (!open) {
      this._setPlaying(false);
      this._shown = null;
      this._draw([]);
    }
    this._map.measure();
  }

  _introduction() {
    const framework = String(this._view?.job.framework ?? "");
    return this._view?.introduction ?? INTRODUCTIONS.find(([pattern]) => pattern.test(framework))?.[1] ?? framework;
  }

  _step(by) {
    this._setPlaying(false);
    this._show(this._index + by);
  }

  _setPlaying(playing) {
    this._playing = playing;
    clearTimeout(this._timer);
    setText(byId("lecture-play"), playing ? "Pause" : "Play");
    byId("lecture-play").setAttribute("aria-pressed", String(playing));
    if (playing) this._playNext();
  }

  _playNext() {
    if (!this._playing) return;
    const waiting = this._moments.length - 1 - this._index;
    if (waiting > 0) this._show(this._index + 1);
    else if (this._view.over) {
      this._setPlaying(false);
      return;
    }
    // Behind a running job it hurries; a recorded one has time.
    const hurry = this._view.over ? 1 : Math.max(1, waiting / PATIENCE);
    this._timer = setTimeout(() => this._playNext(), STAY_MS / hurry);
  }

  _show(index) {
    const moment = this._moments[index];
    if (!moment) return;
    this._index = index;
    setText(byId("lecture-sentence"), sentenceOf(moment, this._view.sentences));
    this._counted();
    this._onMoment(moment.at);
    this._shown = { moment, since: performance.now() };
    requestAnimationFrame((now) => this._travel(now));
  }

  _counted() {
    const total = this._moments.length;
    setText(byId("lecture-count"), total ? `${this._index + 1} of ${total}` : "");
    byId("lecture-back").disabled = this._index <= 0;
    byId("lecture-next").disabled = this._index >= total - 1;
  }

  _travel(now) {
    if (!this._shown) return;
    const { moment, since } = this._shown;
    const passed = (now - since) / TRAVEL_MS;
    // The dot stays near its end, where its name can be read.
    const share = lessMotion() ? 0.5 : Math.min(0.82, Math.max(0, passed) * 0.82);
    const tag = `${NAMES[moment.what] ?? moment.what}${moment.bucket < 0 ? "" : ` ${moment.bucket}`}`;
    this._draw(moment.to.map((to, index) => ({ from: moment.from, to, what: moment.what, share, tag: index ? null : tag })));
    if (passed < 1 && !lessMotion()) requestAnimationFrame((next) => this._travel(next));
  }

  _draw(dots) {
    const geometry = this._map.geometry;
    if (!geometry) return;
    this._dotted = dots.length > 0;
    const context = clearedContext(this._map.dots, geometry.width, geometry.height);
    for (const { from, to, what, share, tag } of dots) {
      const curve = geometry.curve(from, to);
      if (!curve) continue;
      const [x, y] = alongCurve(curve, share);
      this._dot(context, what, x, y);
      if (tag) drawTag(context, this._palette, tag, x, y - 24, 14);
    }
  }

  // Gradients are discs, values squares, and messages that carry neither are rings.
  _dot(context, what, x, y) {
    context.beginPath();
    context.fillStyle = GRADIENTS.has(what) ? this._palette["line-1"] : this._palette["line-2"];
    context.strokeStyle = this._palette.surface;
    context.lineWidth = 2;
    if (!DATA.has(what)) {
      context.strokeStyle = this._palette.ink;
      context.lineWidth = 3;
      context.arc(x, y, 6, 0, 7);
      context.stroke();
      return;
    }
    if (GRADIENTS.has(what)) context.arc(x, y, 9, 0, 7);
    else context.rect(x - 8, y - 8, 16, 16);
    context.fill();
    context.stroke();
  }
}
