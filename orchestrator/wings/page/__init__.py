"""A sweep's report as a page: report.html with its pictures, which are files too, and report.png."""
