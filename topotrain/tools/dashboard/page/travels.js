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

/** What a message is called. Others are called by their own word. */
const NAMES = {
  push: "gradient", gradient: "gradient", sum: "sum of gradients", partial: "partial sum", mean: "mean gradient",
  edit: "changed gradient", values: "values", difference: "changes", master: "values", offer: "values", reply: "changes",
  commit: "end of the step", vote: "all parts are here", apply: "decision", applied: "step is made", missed: "missed step",
};
const DATA = new Set(["push", "gradient", "sum", "partial", "mean", "edit", "values", "difference", "master", "offer", "reply"]);
const GRADIENTS = new Set(["push", "gradient", "sum", "partial", "mean", "edit"]);

const TRAVEL_MS = 1100;
const STAY_MS = 2600;
/** With more messages in waiting than these, playing goes faster, so that it keeps up with the job. */
const PATIENCE = 6;
/** While the replay plays, a message is seen for so many seconds of the job. */
const TRAIL_S = 0.8;

/** The sentence of a travel: that of the recording, or a plain one. */
export function sentenceOf([, from, to, what, step, bucket, sentence]) {
  if (sentence) return String(sentence);
  const of = DATA.has(what) ? ` of ${bucket < 0 ? "all its slices" : `slice ${bucket}`}` : "";
  const verb = GRADIENTS.has(what) && what !== "mean" ? "pushes its" : "sends its";
  return `${from} ${verb} ${NAMES[what] ?? what}${of} to ${to}, step ${step}.`;
}

/** The panel of the lecture, and the dots on the map. */
export class Lecture {
  constructor(map, onMoment) {
    this._map = map;
    this._onMoment = onMoment;
    this._travels = [];
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
    if (view.travels.at(-1) === this._travels.at(-1)) return;
    // The oldest ones may have been dropped meanwhile.
    const here = this._travels[this._index];
    this._travels = [...view.travels];
    if (here) this._index = Math.max(0, this._travels.indexOf(here));
    this._switch.hidden = this._travels.length === 0;
    if (this._open === null && this._travels.length) this._setOpen(true);
    this._say();
  }

  /** Show what travels at a moment of the replay, while the lecture itself does not play. */
  setMoment(t) {
    if (this._shown && Math.abs(this._shown.travel[0] - t) > 0.01) this._shown = null;
    if (this._shown || !this._view) return;
    // At the end of a job that is over, the lecture begins with its first message.
    if (this._view.running || t < this._view.end - 0.01) {
      this._index = lastBefore(this._travels, t);
      this._say("off");
    }
    if (!this._map.geometry) return;
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
    return INTRODUCTIONS.find(([pattern]) => pattern.test(framework))?.[1] ?? framework;
  }

  _step(by) {
    this._setPlaying(false);
    this._show(this._index + by);
  }

  _setPlaying(playing) {
    this._playing = playing;
    clearTimeout(this._timer);
    setText(byId("lecture-play"), playing ? "Pause messages" : "Play messages");
    byId("lecture-play").setAttribute("aria-pressed", String(playing));
    if (playing) this._playNext();
  }

  _playNext() {
    if (!this._playing) return;
    const waiting = this._travels.length - 1 - this._index;
    if (waiting > 0) this._show(this._index + 1);
    else if (!this._view.running) {
      this._setPlaying(false);
      return;
    }
    // Behind a running job it hurries; a recorded one has time.
    const hurry = this._view.running ? Math.max(1, waiting / PATIENCE) : 1;
    this._timer = setTimeout(() => this._playNext(), STAY_MS / hurry);
  }

  _show(index) {
    const travel = this._travels[index];
    if (!travel) return;
    this._index = index;
    this._say();
    // First: the moment of the message must not be taken for one that the reader has chosen.
    this._shown = { travel, since: performance.now() };
    this._onMoment(travel[0]);
    requestAnimationFrame((now) => this._travel(now));
  }

  // The sentence of the present message. `live`: "off" where messages pass by themselves, faster than they can be read out.
  _say(live = "polite") {
    const total = this._travels.length;
    const travel = this._travels[this._index];
    byId("lecture-sentence").setAttribute("aria-live", live);
    setText(byId("lecture-sentence"), travel ? sentenceOf(travel) : "Next shows the first message.");
    setText(byId("lecture-count"), total ? `${this._index + 1} of ${total}` : "");
    byId("lecture-back").disabled = this._index <= 0;
    byId("lecture-next").disabled = this._index >= total - 1;
  }

  _travel(now) {
    if (!this._shown) return;
    const { travel, since } = this._shown;
    const [, from, to, what, , bucket] = travel;
    const passed = (now - since) / TRAVEL_MS;
    // The dot stays near its end, where its name can be read.
    const share = lessMotion() ? 0.5 : Math.min(0.82, Math.max(0, passed) * 0.82);
    const tag = `${NAMES[what] ?? what}${bucket < 0 ? "" : ` ${bucket}`}`;
    this._draw([{ from, to, what, share, tag }]);
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
