// Fill the list of versions. ../versions.js (docs/site/versions.py writes it) sets window.siteVersions. It is a script,
// not JSON that is fetched, since browsers fetch nothing for pages that were opened from a disk.
document.addEventListener("DOMContentLoaded", () => {
  const lists = document.querySelectorAll(".versions select");
  if (!lists.length) return;
  const root = lists[0].dataset.root.replace(/[^/]*$/, "");
  const script = document.createElement("script");
  script.src = `${root}../versions.js`;
  script.onload = () => lists.forEach((list) => {
    const { page, version } = list.dataset;
    list.replaceChildren(...window.siteVersions.map((each) =>
      new Option(each.name, each.version, false, each.version === version)));
    list.addEventListener("change", () => {
      const chosen = window.siteVersions.find((each) => each.version === list.value);
      const same = `${page}.html`;
      location.href = `${root}../${chosen.version}/${chosen.pages.includes(same) ? same : "index.html"}`;
    });
  });
  document.head.append(script);
});
