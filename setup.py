"""Installs the package; every setting is in settings.ini, nothing is to be edited here."""

import re
from configparser import ConfigParser
from pathlib import Path

import setuptools

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

statuses = ["", "1 - Planning", "2 - Pre-Alpha", "3 - Alpha", "4 - Beta", "5 - Production/Stable"]
pythons = ["3.10", "3.11", "3.12", "3.13"]
licenses = {"apache2": "Apache-2.0"}
extra = "_requirements"
readme = here / "README.md"


def for_everywhere(text: str) -> str:
    """Make the links and pictures of `text` that are files of the project addresses online."""
    base = cfg["git_url"] + "/{0}/" + cfg["branch"] + "/"
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", r"\g<1>" + base.format("raw"), text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!\w+:|#)", r"\g<1>" + base.format("blob"), text)


setuptools.setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=for_everywhere(readme.read_text(encoding="utf-8")) if readme.exists() else "",
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    license=licenses[cfg["license"]],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"]},
    classifiers=[
        "Development Status :: " + statuses[int(cfg["status"])],
        "Intended Audience :: " + cfg["audience"],
        "Natural Language :: " + cfg["language"],
        *("Programming Language :: Python :: " + o for o in pythons),
    ],
    packages=setuptools.find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    package_data={cfg["lib_path"]: ["py.typed"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={k.removesuffix(extra): v.split() for k, v in cfg.items() if k.endswith(extra)},
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        # nbdev's documentation of other libraries finds our symbols through this index
        "nbdev": ["{0}={0}._modidx:d".format(cfg["lib_path"])],
    },
    zip_safe=False,
)
