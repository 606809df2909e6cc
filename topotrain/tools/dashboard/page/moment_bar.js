// The moment that the page shows: it follows a running job, or a slider.

import { byId, clockText, setText } from "./elements.js";

/** The bar at the bottom. `t` is the moment in seconds since the start. */
export class MomentBar {
  constructor(onMoment) {
    this._onMoment = onMoment;
    this._slider = byId("moment-slider");
    this._follow = byId("moment-follow");
    [this.t, this.end, this.follows] = [0, 0, true];
    this._slider.addEventListener("input", () => this.goTo(Number(this._slider.value)));
    this._follow.addEventListener("click", () => this.follow());
  }

  /** The job is known up to `end`; `running`: it goes on. */
  setEnd(end, running) {
    this.end = end;
    this._slider.max = end;
    setText(this._follow, running ? "Follow" : "To the end");
    this._set(this.follows ? end : this.t);
  }

  goTo(t) {
    this.follows = false;
    this._set(t);
  }

  follow() {
    this.follows = true;
    this._set(this.end);
  }

  _set(t) {
    this.t = Math.min(this.end, Math.max(0, t));
    this._slider.value = this.t;
    const text = `${clockText(this.t)} / ${clockText(this.end)}`;
    this._slider.setAttribute("aria-valuetext", text);
    setText(byId("moment-time"), text);
    this._follow.setAttribute("aria-pressed", String(this.follows));
    this._onMoment();
  }
}
