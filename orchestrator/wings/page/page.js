"use strict";
(() => {
  const table = document.getElementById("points");
  // A table of the comparison is a body; with several, the first row of each is its name.
  const bodies = Array.from(table.tBodies, (body) => [body, Array.from(body.rows).filter((row) => row.dataset.row)]);
  const rows = bodies.flatMap(([, own]) => own);
  const filter = document.getElementById("filter");
  const state = document.getElementById("state");

  // Numbers before words, and what is empty last in both directions.
  const value = (row, column) => {
    const text = row.cells[column].dataset.v;
    return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
  };
  const order = (one, other) => {
    if (typeof one === typeof other) return one < other ? -1 : one > other ? 1 : 0;
    return typeof one === "number" ? -1 : 1;
  };
  const sort = (header) => {
    const column = header.cellIndex;
    const falls = header.getAttribute("aria-sort") === (header.dataset.first || "ascending")
      ? header.dataset.first !== "descending" : header.dataset.first === "descending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const falling = (a, b) => {
      const [one, other] = [value(a, column), value(b, column)];
      if ((one === "") !== (other === "")) return one === "" ? 1 : -1;
      return order(one, other) * (falls ? -1 : 1);
    };
    for (const [body, own] of bodies) body.append(...own.sort(falling));
  };
  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => sort(header));
  }

  // Every word has to occur in a row; a word after a minus sign must not.
  const narrow = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => (word[0] === "-" ? !text.includes(word.slice(1)) : text.includes(word)));
      row.hidden = !fits || (state.value !== "" && row.dataset.state !== state.value);
      shown += row.hidden ? 0 : 1;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} points`;
  };
  filter.addEventListener("input", narrow);
  state.addEventListener("change", narrow);

  // The row under the mouse, and its marks in the pictures.
  const highlight = document.createElement("style");
  document.head.append(highlight);
  let lit = null;
  const light = (number) => {
    if (number === lit) return;
    lit = number;
    for (const row of rows) row.classList.toggle("lit", row.dataset.row === number);
    highlight.textContent = number === null ? ""
      : `figure svg:has([data-row="${number}"]) [data-row]:not([data-row="${number}"]){opacity:.25}`;
  };
  const rowOf = (event) => event.target.closest("[data-row]")?.dataset.row ?? null;
  table.addEventListener("mouseover", (event) => light(rowOf(event)));
  table.addEventListener("mouseleave", () => light(null));
  for (const picture of document.querySelectorAll("figure svg")) {
    picture.addEventListener("mouseover", (event) => light(rowOf(event)));
    picture.addEventListener("mouseleave", () => light(null));
  }

  const themes = ["", "light", "dark"];
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "") + 1) % themes.length];
    document.documentElement.dataset.theme = next;
    button.textContent = `theme: ${next || "as the system"}`;
  });

  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  window.addEventListener("hashchange", open);
  open();
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
