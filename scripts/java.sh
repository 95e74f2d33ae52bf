# Sourced by the scripts beside it: Java for Spark, and a Spark home that may be written to.
#
# tfos_java          sets and exports JAVA_HOME to a Java of version 17 or later (17 before 21 before others);
#                    installs a headless one as root with apt, else stops with the one command to run. Call it
#                    before tfos_env: who may not install one should not wait for the packages.
# tfos_spark DIR     sets and exports SPARK_HOME to DIR/spark, links to pip's pyspark: local-cluster executors
#                    make their work directories under $SPARK_HOME/work, which must not be inside the
#                    installed package. Directories take the place of its zip files of modules: Python keeps
#                    nothing compiled of a zip file, so each executor would take 0.7 s more to start.
# TFOS_QUICK_JVM     options for JVMs that live shortly on a few cores.
# tfos_spark_classes makes $SPARK_HOME/classes.jsa, Spark's classes as a JVM holds them. One that is started
#                    with -XX:SharedArchiveFile of it, from this SPARK_HOME, takes two thirds of the time.
# tfos_hadoop KIND … runs scripts/local_hdfs for an "hdfs" or a "yarn", with Java and Maven to start one.
# tfos_quiet DIR     keeps Spark's own log to warnings and its temporary files in DIR.

TFOS_QUICK_JVM="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

tfos_java_major() {
  "$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1
}

# One line "rank major home" for each usable Java; the smallest rank is the one Spark is tested most with.
tfos_java_list() {
  local home major rank
  for home in "${JAVA_HOME:-}" /usr/lib/jvm/* "$(readlink -f "$(command -v java)" 2>/dev/null | sed 's|/bin/java$||')"; do
    [ -n "$home" ] && [ -x "$home/bin/java" ] || continue
    major=$(tfos_java_major "$home")
    case "$major" in '' | *[!0-9]*) continue ;; esac
    [ "$major" -ge 17 ] || continue
    case "$major" in 17) rank=0 ;; 21) rank=1 ;; *) rank=$major ;; esac
    echo "$rank $major $home"
  done
}

tfos_java() {
  local best
  best=$(tfos_java_list | sort -n -s -k1,1 | head -n 1)
  if [ -z "$best" ]; then
    tfos_can_apt || tfos_fail "Spark needs Java 17 or later and none was found; run: sudo apt-get install openjdk-17-jre-headless"
    tfos_apt_install openjdk-17-jre-headless || tfos_apt_install default-jre-headless ||
      tfos_fail "apt-get could not install openjdk-17-jre-headless; install a Java 17 or later and set JAVA_HOME"
    best=$(tfos_java_list | sort -n -s -k1,1 | head -n 1)
    [ -n "$best" ] || tfos_fail "no Java 17 or later after installing one; set JAVA_HOME"
  fi
  export JAVA_HOME="${best#* * }"
  export PATH="$JAVA_HOME/bin:$PATH"
}

tfos_spark() {
  local installed entry zip
  installed=$("$PY" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)') ||
    tfos_fail "pyspark is not installed in $TFOS_VENV; delete .venv and run again"
  mkdir -p "$1/spark/work"
  for entry in bin jars sbin; do
    ln -sfn "$installed/$entry" "$1/spark/$entry"
  done
  for zip in "$installed"/python/lib/*.zip; do
    entry=${zip##*/}
    mkdir -p "$1/spark/python/lib/$entry"
    ln -sfn "$installed/../${entry%%[-.]*}" "$1/spark/python/lib/$entry/${entry%%[-.]*}"
  done
  ln -sfn "$installed/python/pyspark" "$1/spark/python/pyspark"
  export SPARK_HOME="$1/spark"
}

tfos_hadoop() {
  local python
  python=$(tfos_find_python sys) || tfos_fail "Python 3.11 or later is needed"
  if [ "${2:-}" = up ]; then
    tfos_java
    command -v mvn >/dev/null || { tfos_can_apt && tfos_apt_install maven; } ||
      tfos_fail "Hadoop is downloaded by Maven; run: sudo apt-get install maven"
  fi
  cd "$TFOS_ROOT"
  exec "$python" -m scripts.local_hdfs "$@"
}

tfos_spark_classes() {
  local made="$SPARK_HOME/classes.new"
  JAVA_TOOL_OPTIONS="$TFOS_QUICK_JVM -XX:ArchiveClassesAtExit=$made -Xlog:disable" \
    timeout 300 "$PY" - 2>/dev/null <<'PY' && mv "$made" "$SPARK_HOME/classes.jsa"
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.createDataFrame([(n, str(n)) for n in range(8)], ["number", "text"]).repartition(2)
frame.mapInArrow(lambda batches: batches, frame.schema).groupBy("text").count().collect()
frame.rdd.map(tuple).barrier().mapPartitions(list).collect()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()  # it writes as it ends
PY
}

tfos_quiet() {
  mkdir -p "$1/conf" "$1/tmp"
  cat >"$1/conf/log4j2.properties" <<'LOG4J'
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
logger.utils.name = org.apache.spark.util.Utils
logger.utils.level = error
LOG4J
  export SPARK_CONF_DIR="$1/conf" SPARK_LOCAL_DIRS="$1/tmp"
}
