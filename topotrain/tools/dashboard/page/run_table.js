// The runs that the page shows side by side: their settings that differ, how they end, and which of them are in the charts.

import { byId, make, setText } from "./elements.js";

/** The table of the runs. onHide is called with the names that are hidden, onSelect with the number of a run. */
export class RunTable {
  constructor(onHide, onSelect) {
    this._onHide = onHide;
    this.hidden = new Set();
    [this._shape, this._chosen] = ["", 0];
    this._rows = byId("run-rows");
    this._rows.addEventListener("change", ({ target }) => {
      if (target.type === "checkbox") this.toggle(target.value);
      else onSelect(this._chosen = Number(target.value));
    });
  }

  /** Hide a run in the charts, or show it again. */
  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    for (const box of this._rows.querySelectorAll("[type=checkbox]")) box.checked = !this.hidden.has(box.value);
    this._onHide(this.hidden);
    // What Plotly would do itself at a click on its legend, it leaves to the page.
    return false;
  }

  /** Show what is known of all runs. selectable: the page can show each of them. */
  update(runs, selectable) {
    byId("runs").hidden = false;
    const heads = ["in charts", "run", ...Object.keys(runs[0].columns)];
    const shape = JSON.stringify([heads, runs.map(({ name }) => name)]);
    if (shape !== this._shape) this._rebuild(heads, runs, selectable);
    this._shape = shape;
    runs.forEach(({ columns }, row) => Object.values(columns).forEach((text, place) => (
      setText(this._rows.children[row].children[place + 2], text))));
  }

  _rebuild(heads, runs, selectable) {
    byId("run-heads").replaceChildren(...heads.map((text) => make("th", { scope: "col", text })));
    this._rows.replaceChildren(...runs.map(({ name }, index) => {
      const shown = make("input", { type: "checkbox", value: name, checked: !this.hidden.has(name), "aria-label": `${name} in the charts` });
      const chosen = make("input", { type: "radio", name: "run", value: index, checked: index === this._chosen, hidden: !selectable });
      const label = make("label", { title: "Show its map, processes and events" }, [chosen, name]);
      return make("tr", {}, [make("td", {}, [shown]), make("th", { scope: "row" }, [label]), ...heads.slice(2).map(() => make("td"))]);
    }));
  }
}
