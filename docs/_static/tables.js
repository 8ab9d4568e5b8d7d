// Tables of a terminal scroll: site.css wraps long lines of other output.
document.addEventListener("DOMContentLoaded", () => {
  for (const pre of document.querySelectorAll(".bd-article pre"))
    if (/[│┃]|^GPU0 +X /m.test(pre.textContent)) pre.style.whiteSpace = "pre";
});
// Label the cells of tables with the heads of their columns, which site.css shows where it stacks the cells.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, column) => {
        if (column && heads[column] && cell.textContent.trim()) cell.dataset.head = `${heads[column]}: `;
      });
  }
});
