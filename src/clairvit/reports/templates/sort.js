"use strict";
/* Tables are sorted by a click on a heading; the page is complete without it. Baselines stay apart. */
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    const wrap = () => {
      button.append(...head.childNodes);
      head.append(button);
    };
    wrap();
    /* Chromium repeats a table's head on every printed page, but leaves out the buttons in it. */
    addEventListener("beforeprint", () => button.replaceWith(...button.childNodes));
    addEventListener("afterprint", wrap);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      for (const body of table.tBodies) {
        const rows = [...body.rows];
        const text = (row) => row.cells[column].textContent;
        const value = (row) => parseFloat(row.cells[column].dataset.order);
        const sign = down ? -1 : 1;
        rows.sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          if (Number.isNaN(x) && Number.isNaN(y)) return sign * text(a).localeCompare(text(b));
          if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
          return sign * (x - y);
        });
        body.append(...rows);
      }
    });
  });
}
