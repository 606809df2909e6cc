// The events of the job as a list, newest first; each goes to its moment.

import { byId, clockText, make, setText } from "./elements.js";
import { markOf } from "./line_chart.js";

const SHOWN = 200;

const KINDS = {
  incident: "lost", recovered: "recovered", snapshot: "snapshot", left: "left", joined: "joined", resized: "resized",
  skipped: "skipped step", notice: "notice", failed: "failed", evaluation: "evaluation", ended: "ended",
};

/** The list of events. */
export class EventList {
  constructor(onChoose) {
    this._list = byId("event-list");
    this._more = byId("event-more");
    this._onChoose = onChoose;
    this._limit = SHOWN;
    this._rows = new Map();
    this._list.addEventListener("click", (event) => this._clicked(event));
    this._list.addEventListener("keydown", (event) => this._moved(event));
    this._more.addEventListener("click", () => this._showAll());
  }

  /** Show the events of a job. */
  update(view) {
    this._view = view;
    const shown = view.events.slice(-this._limit);
    const wanted = new Set(shown);
    for (const [event, row] of this._rows) {
      if (wanted.has(event)) continue;
      row.remove();
      this._rows.delete(event);
    }
    for (const event of shown) {
      if (this._rows.has(event)) continue;
      const row = this._row(event);
      this._rows.set(event, row);
      this._list.prepend(row);
    }
    byId("event-none").hidden = view.events.length > 0;
    this._more.hidden = view.events.length <= this._limit;
    setText(this._more, `Show all ${view.events.length}`);
  }

  /** Show which events lie before the moment of the replay, and which one was chosen. */
  setMoment(t, chosen) {
    for (const [event, row] of this._rows) {
      row.classList.toggle("later", event.at > t + 1e-6);
      row.firstElementChild.setAttribute("aria-current", event === chosen ? "true" : "false");
    }
  }

  /** Bring an event's row into sight, if it is not. */
  reveal(event) {
    this._rows.get(event)?.scrollIntoView({ block: "nearest" });
  }

  _showAll() {
    this._limit = Infinity;
    for (const row of this._rows.values()) row.remove();
    this._rows.clear();
    this.update(this._view);
    this._list.querySelector("button")?.focus();
  }

  _row(event) {
    const [shape, colour] = markOf(event.kind);
    const kind = KINDS[event.kind] ?? String(event.kind);
    const button = make("button", { type: "button", class: "event", "data-kind": event.kind }, [
      make("time", { text: clockText(event.at) }),
      make("span", { class: `mark ${shape}`, "data-colour": colour, "aria-hidden": "true" }),
      make("span", { class: "kind", text: kind }),
      make("span", { class: "of", text: event.of && event.of !== "job" ? event.of : "" }),
      make("span", { class: "text", text: event.text ?? "" }),
    ]);
    return make("li", {}, [button]);
  }

  _eventOf(button) {
    for (const [event, row] of this._rows) if (row === button?.parentElement) return event;
    return null;
  }

  _clicked(click) {
    const event = this._eventOf(click.target.closest(".event"));
    if (event) this._onChoose(event);
  }

  _moved(press) {
    const row = press.target.closest("li");
    const next = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[press.key];
    if (!next) return;
    press.preventDefault();
    next.firstElementChild.focus();
  }
}
