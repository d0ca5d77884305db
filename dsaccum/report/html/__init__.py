"""A record as one HTML page that needs nothing beside it: no network, no other file, no script.

What a page says stands in ``templates``: ``page.html`` is the frame of all of them, ``parts.html`` has what several
records share, and each schema has a template of its own. Nothing here is imported before a page is asked for.
"""

from dsaccum.report.html.page import as_html, as_one_page, write_html

__all__ = ["as_html", "as_one_page", "write_html"]
