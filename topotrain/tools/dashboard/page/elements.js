// Elements of the page, and figures as text. All strings become text nodes, never markup.

/** Return the element of index.html that has this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** Make an element; `attributes` may hold `class`, `text` and any attribute. */
export function make(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Set an element's text, without touching the document when it is the same. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Let the arrow keys go through the buttons of an area, where Tab stops once: there may be hundreds. */
export function arrowKeys(area, selector) {
  area.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = [...area.querySelectorAll(selector)];
    const here = all.indexOf(event.target);
    if (!step || here < 0) return;
    event.preventDefault();
    all[here + step]?.focus();
  });
  area.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector)) return;
    for (const other of area.querySelectorAll(selector)) other.tabIndex = other === event.target ? 0 : -1;
  });
}

/** Seconds as m:ss or h:mm:ss. */
export function clockText(seconds) {
  // A sum of tenths may be a little less than the second that it means.
  const whole = Math.max(0, Math.floor(seconds + 1e-6));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const NUMBER = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** A number with three digits that count. */
export function numberText(value, unit = "") {
  return Number.isFinite(value) ? NUMBER.format(value) + unit : "–";
}
