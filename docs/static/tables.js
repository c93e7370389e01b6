// Each cell carries its column's name, which hocket.css shows on a narrow screen in place of the table's head.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (names.length < 2) continue;
    table.classList.add("stacked");
    if (names.length > 8) table.classList.add("wide");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, place) => {
        if (place > 0 && names.length > 2 && names[place] && cell.textContent.trim()) cell.dataset.column = names[place];
        if (!cell.textContent.trim()) cell.hidden = true;
      });
  }
});
