// The events of the job as a list, newest first; each goes to its moment.

import { arrowKeys, byId, clockText, make } from "./elements.js";

/** How each kind of event is called, its mark, as Plotly names it, and the name of its color. */
const KINDS = {
  incident: ["lost", "x", "bad"], failed: ["failed", "x", "bad"], skipped: ["skipped step", "x", "notable"],
  recovered: ["recovered", "circle-open", "good"], snapshot: ["snapshot", "square", "muted"],
  left: ["left", "triangle-down", "notable"], joined: ["joined", "triangle-up", "good"], resized: ["resized", "diamond", "notable"],
  evaluation: ["evaluation", "circle-open", "muted"], notice: ["notice", "circle", "muted"], ended: ["ended", "line-ns", "ink"],
};

/** An event's kind: [word, mark, color]. */
export function kindOf(event) {
  return KINDS[event.kind] ?? [event.kind, "circle", "muted"];
}

/** How the list shows the marks. */
const SIGNS = { x: "✕", "circle-open": "○", circle: "•", square: "■", diamond: "◆", "triangle-up": "▲", "triangle-down": "▼", "line-ns": "┃" };

export class EventList {
  constructor(onChoose) {
    this._list = byId("event-list");
    this._rows = new Map();
    this._list.addEventListener("click", (click) => {
      const found = [...this._rows].find(([, row]) => row.contains(click.target));
      if (found) onChoose(found[0]);
    });
    arrowKeys(this._list, ".event");
  }

  /** Show the events of a job. The server keeps a bounded number of them. */
  update(view) {
    if (this._view !== view) {
      this._rows.clear();
      this._list.replaceChildren();
    }
    this._view = view;
    for (const event of view.events.slice(this._rows.size)) {
      this._rows.set(event, this._row(event));
      this._list.prepend(this._rows.get(event));
    }
    byId("event-none").hidden = view.events.length > 0;
  }

  /** Show which events lie before the moment of the page, and which one was chosen. */
  setMoment(t, chosen) {
    for (const [event, row] of this._rows) {
      row.classList.toggle("later", event.at > t + 1e-6);
      row.firstElementChild.setAttribute("aria-current", String(event === chosen));
    }
  }

  _row(event) {
    const [word, mark, color] = kindOf(event);
    return make("li", {}, [make("button", { type: "button", class: "event", "data-kind": event.kind,
      tabindex: this._rows.size ? "-1" : "0" }, [
      make("time", { text: clockText(event.at) }),
      make("span", { class: "mark", "data-colour": color, "aria-hidden": "true", text: SIGNS[mark] }),
      make("span", { class: "kind", text: word }),
      make("span", { class: "of", text: event.of === "job" ? "" : event.of }),
      make("span", { class: "text", text: event.text }),
    ])]);
  }
}
