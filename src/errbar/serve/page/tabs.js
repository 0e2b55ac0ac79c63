// Tabs: one panel at a time, chosen by pointer, or with arrow keys, Home and End.

// `list` holds buttons with aria-controls; `chosen` is told the id of the panel that is shown.
export function tabs(list, chosen) {
  const all = [...list.querySelectorAll("[role=tab]")];
  const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
  const choose = (tab) => {
    for (const one of all) {
      one.setAttribute("aria-selected", one === tab);
      one.tabIndex = one === tab ? 0 : -1;
      panel(one).hidden = one !== tab;
    }
    chosen(panel(tab).id);
  };
  all.forEach((tab, place) => {
    panel(tab).setAttribute("role", "tabpanel");
    panel(tab).setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = all.at(to % all.length);
      next.focus();
      choose(next);
    });
  });
  list.hidden = false;
  choose(all.find((tab) => location.hash === `#${panel(tab).id}`) || all[0]);
}
