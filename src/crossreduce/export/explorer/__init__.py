"""The plan explorer: a plan as one HTML file that any browser shows without a network.

Input: a ``Plan`` and a path. Output: a file of at most 1 MB. ``positions.py`` places the nodes, ``link_groups.py``
groups links, ``trees.py`` groups trees and rings, ``losses.py`` plans without single links and network cards,
``model.py`` collects all values that the page shows, and ``page.py`` joins them with the styles and scripts of
``assets/``. Cytoscape.js draws the wiring and uPlot the charts; both are in ``assets/`` with their licenses.
"""

from .page import Beside, report_html, stages, with_losses, write_report

__all__ = ["Beside", "report_html", "stages", "with_losses", "write_report"]
