"""Find boilerplate (text that many pages of a site repeat), and cut it from the pages."""
