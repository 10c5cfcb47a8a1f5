"""``sakiyomi bench report``: figures redrawn from measurements made here, on one page."""
