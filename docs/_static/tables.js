// Label the cells of tables with the heads of their columns, which site.css shows where it stacks the cells.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, column) => { if (column && heads[column]) cell.dataset.head = `${heads[column]}: `; });
  }
});
