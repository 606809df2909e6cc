// The moment that the page shows: it follows a running job, or a slider, or plays.

import { byId, clockText, make, setText, spokenTime } from "./elements.js";
import { markOf } from "./line_chart.js";

const MARKS_SHOWN = 150;

/** The bar at the bottom. `t` is the moment in seconds since the start. */
export class ReplayBar {
  constructor(onMoment) {
    this._onMoment = onMoment;
    this._slider = byId("replay-slider");
    this._play = byId("replay-play");
    this._live = byId("replay-live");
    this._marks = byId("replay-marks");
    this.t = 0;
    this.end = 0;
    this.follows = true;
    this._playing = false;
    this._slider.addEventListener("input", () => this.goTo(Number(this._slider.value)));
    this._play.addEventListener("click", () => this._setPlaying(!this._playing));
    this._live.addEventListener("click", () => this.follow());
    document.addEventListener("keydown", (event) => this._pressed(event));
  }

  /** The job is known up to `end`; `running`: it goes on. */
  setEnd(end, running) {
    this.end = end;
    setText(this._live, running ? "Follow" : "To the end");
    const step = Math.max(0.1, Math.round(end * 2) / 1000);
    // A slider ends at a whole number of steps; `goTo` keeps to the end of the job.
    this._slider.max = String(Math.ceil(end / step - 1e-6) * step);
    this._slider.step = String(step);
    if (this.follows) this._set(end);
    else this._show();
  }

  /** Stay at a moment. */
  goTo(t) {
    this._setPlaying(false);
    this.follows = false;
    this._set(t);
  }

  /** Go to the end, and with it. */
  follow() {
    this._setPlaying(false);
    this.follows = true;
    this._set(this.end);
  }

  /** Show where the events lie. */
  setEvents(events) {
    const key = `${events.length} ${Math.round(this.end)}`;
    if (this._key === key) return;
    this._key = key;
    this._marks.replaceChildren(...events.slice(-MARKS_SHOWN).map((event) => {
      const mark = make("span", { "data-colour": markOf(event.kind)[1] });
      mark.style.left = `${Math.min(100, (event.at / this.end) * 100)}%`;
      return mark;
    }));
  }

  _set(t) {
    this.t = Math.min(this.end, Math.max(0, t));
    this._show();
    this._onMoment();
  }

  _show() {
    // The slider rounds to its steps, so it is not what counts.
    this._slider.value = String(this.t);
    this._slider.setAttribute("aria-valuetext", `${spokenTime(this.t)} of ${spokenTime(this.end)}`);
    setText(byId("replay-time"), `${clockText(this.t)} / ${clockText(this.end)}`);
    this._live.setAttribute("aria-pressed", String(this.follows));
  }

  _setPlaying(playing) {
    if (this._playing === playing) return;
    this._playing = playing;
    setText(this._play, playing ? "Pause" : "Play");
    this._play.setAttribute("aria-label", playing ? "Pause the job" : "Play the job");
    this._play.setAttribute("aria-pressed", String(playing));
    if (!playing) return;
    if (this.t >= this.end - 0.05) this.t = 0;
    this.follows = false;
    this._last = performance.now();
    requestAnimationFrame((now) => this._advance(now));
  }

  _advance(now) {
    if (!this._playing) return;
    const passed = Math.max(0, now - this._last) / 1000;
    this._last = now;
    const t = this.t + passed * Number(byId("replay-speed").value);
    if (t >= this.end) {
      this.follow();
      return;
    }
    this._set(t);
    requestAnimationFrame((next) => this._advance(next));
  }

  _pressed(event) {
    // The space bar plays, except where it has a meaning of its own.
    if (event.key !== " " || event.target.closest("button, input, select, summary, a, [role=region]")) return;
    event.preventDefault();
    this._setPlaying(!this._playing);
  }
}
